"""Run specification and script generation: `Spec`, checkpoints to resume from, the script generator.

It never imports torch, `launch` or front ends.

`Spec` is the only gate. It validates itself when it is created, and `Spec.on(machine)` settles what depends on the
machine (device, ranks, precision, whether the data are available); after that, code trusts its input. Every refusal
is a `SpecError`: the field, and one sentence with the value and the fix.

Each field of `Spec` declares its own metadata (`About` in `plan/spec.py`): its help and flag, its bounds or
choices, whether it applies to strategies or scripts, and whether the panel and a comparison take it. The command
line, the widgets of the panel, the checks of single values and the refusal of a value without an effect are derived
from it; a new field needs nothing else there. `Spec` also checks fields together, has the arithmetic of batches and
steps, and knows what depends on the machine. What takes milliseconds is apart from what may wait for a disk or a
network (`Spec.settled` and `check_available`): the panel asks the latter in a thread.
The bounds of an option are defined at its `Option` (`training/rows.py`).
"""
