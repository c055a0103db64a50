"""The run folder: events and their fold (`RunState`), logs, status, replay. It is the only link between ranks and front
ends.

A folder may come from an untrusted source, so files are opened only below the folder, and values are checked once, when
they are read. The package never imports torch or plotly.
"""
