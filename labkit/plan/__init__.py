"""What is asked for, and the script that follows from it: `Spec`, checkpoints to resume from, the generator of scripts.

It never imports torch, `launch` or front ends.
"""
