"""Strategies, workloads and faults: their tables, and the training code that scripts are generated from.

The tables never import torch. The other modules import only each other from labkit.
"""
