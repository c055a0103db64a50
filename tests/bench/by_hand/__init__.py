"""Hand-written strategies in plain PyTorch, which `labkit bench` compares with the generated scripts."""
