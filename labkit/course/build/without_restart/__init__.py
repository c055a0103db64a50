"""Lab 23: the outer step of DiLoCo, and recovery of a replica within a step."""
