"""Formulas: what a strategy sends per step and what its ranks store between steps (`formulas.py`), collectives as
messages (`collectives.py`), what failures cost (`failures.py`), and how many steps a larger batch saves
(`batch_size.py`)."""
