"""One device and one process: the base program as it stands."""
