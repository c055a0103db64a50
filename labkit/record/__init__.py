"""What a run folder holds: events and their fold (`RunState`), logs, status, replay. The only link between ranks and front ends.

A folder may come from anybody, so files are opened below the folder only, and values are checked once. It never imports torch or plotly.
"""
