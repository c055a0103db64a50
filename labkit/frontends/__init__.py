"""The front ends: the panel, the terminal, the `%%torchrun` magic, handouts and `labkit doctor`.

Front ends never import each other's internals.
"""
