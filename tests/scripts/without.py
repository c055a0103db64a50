"""Runs `every_part.py` under the probe several times, each time as if torch had renamed one private name.

without.py FOLDER [ROW:STYLE …]: ROW is a row of `probe/torch_private.py` (empty: nothing is renamed). The run folder is
FOLDER/ROW-STYLE, the output FOLDER/ROW-STYLE.txt. torch is imported once, and each run is a forked process.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

# of torch only: the names that the probe looks up when it is imported must have been renamed before
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.profiler")
SCRIPT = str(Path(__file__).with_name("every_part.py"))


def run(folder: Path, row: str, style: str) -> None:
    from labkit.probe import torch_private

    if row:
        private = getattr(torch_private, row)
        object.__setattr__(private, "name", f"{private.name}_renamed")
    output = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"LABKIT_RUN_DIR": str(folder), "LABKIT_TENSORS": "1", "LABKIT_SAMPLE_EVERY": "4"}
    sys.argv[:] = ["-m", SCRIPT, style]
    from labkit.probe.__main__ import start

    start()


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a run does not collect what is imported
    for each in sys.argv[2:]:
        row, style = each.split(":")
        if os.fork() == 0:
            run(Path(sys.argv[1], f"{row}-{style}"), row, style)
        os.wait()
