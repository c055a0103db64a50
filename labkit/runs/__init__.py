"""Runs as Python objects: starting and following one run (`handle`), comparing several strategies (`comparing`); runs
on other machines (`gathering`); measuring communication between ranks (`calibration`).

It never imports front ends or torch; figures are imported when they are created.

`run` in `runs/handle.py` settles its arguments into a Spec, starts it and returns a `Run`: its state, figures, logs
and findings, and the methods that wait for it and stop it. `runs/notebook.py` says whether the process is the kernel
of a notebook, and whether it is headless. `runs/guesses.py` keeps what the learner predicts until `start` stores it
in the folder of the next run. `show` in `api.py` picks the front end that fits.
"""
