"""Strategies, workloads and faults: their tables, and the training code that scripts are generated from.

The tables never import torch. The other modules import only each other from labkit.

`training/strategies/__init__.py` and `training/workloads/__init__.py` are light tables. Their rows
(`training/rows.py`) hold every fact that other code needs: what is split and sent, options, packages and files, the
names of the formulas for memory and traffic, and the model in numbers. No code outside the tables compares a name of a
strategy or workload, and a new strategy is therefore one module, one row and one entry in a lab; the tables open no
file and no connection. `tests/training/test_tables.py` and `tests/training/test_new_strategy.py` hold this.
`training/strategies/rules.py` says when a strategy cannot run, what follows from a Spec, and where a pipeline is cut
into stages. The other modules next to them are real training code, which the tests import and run unchanged.
`plan/script.py` takes their *source*, follows the names that `main` uses, and writes one file without a branch on the
strategy and without labkit: an `if` on settings alone is decided during generation, and a short function that is
called once is written in place of its call. The options common to all strategies (precision, accumulation, clipping,
activation checkpointing, compilation, the input pipeline, checkpoints) are therefore written once, in
`training/strategies/base.py` and the modules that it imports. `training/faults/` is the third table, of faults to
inject. `training/faults/code.py` has the functions that they add, which override strategy and base; what a fault omits
is an `if FAULT …` in the base, decided during generation.
`training/strategies/README.md` has the contract between base and strategy. `training/strategies/checkpoints.py` saves
and resumes a whole model, `training/strategies/sharded.py` the shards of every rank; each reads what the other saves.
`training/workloads/draw_digits.py` is a program of its own: the lab runs it once, before the first run that needs its
file (`launch/job.py`), and a packed job takes it along.
`plan/checkpoints.py` finds and verifies the checkpoint that a Spec resumes from, before the launch and without torch.
"""
