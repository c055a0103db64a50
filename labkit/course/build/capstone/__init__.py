"""Lab 17: a trainer on a mesh of data, pipeline and tensor parallelism."""
