"""What torch does, tried in a process of its own: modules here import torch, those of `course/claims/` do not."""
