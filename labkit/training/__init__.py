"""What is trained and how: the tables of strategies, workloads and faults, and the code that scripts are generated from.

The tables never import torch; the other modules never import anything of labkit but each other.
"""
