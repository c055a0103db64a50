"""What a person sees: the panel, the terminal, the `%%torchrun` magic, handouts, `labkit doctor`.

Front ends never import each other's internals.
"""
