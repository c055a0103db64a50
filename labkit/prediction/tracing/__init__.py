"""Runs a training script's own model, strategy, optimizer and step under fake tensors and a fake process group, as one
rank of any number of ranks, and records every allocation and every collective of a step.

It runs in a separate process and imports torch. It never imports launch, front ends or the rest of `predict`.
"""
