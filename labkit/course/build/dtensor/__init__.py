"""Lab 21: a tensor-parallel plan for a block that is drawn for each learner."""
