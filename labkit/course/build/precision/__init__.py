"""Lab 22: a step in mixed precision, and forward under a limit of memory."""
