"""Lab 25: what a sampler holds, and weights from trainers to samplers."""
