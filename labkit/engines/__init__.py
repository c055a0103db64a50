"""Jobs that run without this lab or on another machine: a job as a plain value, and the files of torchrun, Slurm,
Kubeflow and SkyPilot that start it, packed as one zip.

It starts nothing. It never imports torch, the launcher or a front end.
"""
