"""Launches runs: the job, the supervisor, the local launcher, and the warm server.

It never imports front ends or torch; only the warm server loads torch.
"""
