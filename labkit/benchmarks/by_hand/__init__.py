"""Strategies as one would write them by hand with plain PyTorch: `labkit bench` runs them beside the written-out scripts."""
