"""Launches runs: the run folder, the supervisor, the local launcher, and the warm server."""
