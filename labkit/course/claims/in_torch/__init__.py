"""What torch does, tried in a separate process: modules here import torch, those of `course/claims/` do not."""
