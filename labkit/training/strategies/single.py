"""One device and one process: the base program without changes."""
