"""Predicts the memory and traffic of a run before it starts, without a GPU: `predict` traces the generated script.

`tracing/` runs in a separate process, and alone imports torch. This package never imports launch or front ends.
"""
