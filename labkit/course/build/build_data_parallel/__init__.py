"""Lab 13: data parallelism written by the learner, from the all-reduce after backward to FSDP."""
