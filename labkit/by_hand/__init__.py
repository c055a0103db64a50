"""Strategies as one would write them by hand with plain PyTorch, each a script of its own: `labkit bench` runs them beside the written-out ones."""
