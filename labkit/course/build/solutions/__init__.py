"""The reference solutions: tests run them, and the handouts of teachers show parts of them. No rank loads them."""
