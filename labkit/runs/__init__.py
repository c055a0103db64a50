"""Runs as Python objects: starting and following one run (`handle`), comparing several strategies (`comparing`);
measuring communication between ranks (`calibration`).

It never imports front ends or torch; figures are imported when they are created.
"""
