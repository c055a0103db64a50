"""Runs as Python objects: starting one and following it (`handle`), several strategies one after another (`comparing`).

It never imports front ends or torch; what a run can draw is loaded when it is drawn.
"""
