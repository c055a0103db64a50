"""Run specification and script generation: `Spec`, checkpoints to resume from, the script generator.

It never imports torch, `launch` or front ends.
"""
