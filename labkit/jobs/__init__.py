"""Jobs that run without this lab or on another machine: a job as a plain value, and the files of torchrun, Slurm,
Kubeflow and SkyPilot that start it, packed as one zip.

It starts nothing. It never imports torch, the launcher or a front end.

`Portable` in `jobs/portable.py` is a job without this lab: its files, what torchrun starts, nodes and ranks, and
pinned packages; nothing is executed to find them. `jobs/job_files.py` has pure functions from it and a `Profile`
of the site to text. `jobs/archive.py` packs them, and unpacks zips from untrusted sources: every entry is checked
before the first one is written, sizes are counted while they are read, and the folder appears at the end, complete,
or never.
"""
