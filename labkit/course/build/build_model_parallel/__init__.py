"""Lab 14: tensor parallelism, a pipeline and ring attention written by the learner."""
