"""Runs a written-out script, and writes down what else can be known of the memory of the step that the probe samples.

labkit run peaks.py -- SCRIPT FOLDER. Beside the curve stand two figures from elsewhere. `walked`: when the step begins,
the bytes of all tensors that Python knows, but for those that it knew before the model was built (the data set, which
stays on the host), and DDP's buckets by its own account. `grown`: what the C library has handed out from the step's
beginning to the end of its forward, which torch has no part in counting; `curve_grown` is the same by the curve.
"""

import ctypes
import gc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch

from labkit.probe import memory, sampler, timeline
from labkit.probe.steps import StepWatch


class Info(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


LIBRARY = ctypes.CDLL(None)
LIBRARY.mallinfo2.restype = Info


def handed_out() -> int:
    info = LIBRARY.mallinfo2()
    return info.uordblks + info.hblkhd


def storages() -> dict[int, int]:
    """Bytes by address of every tensor that Python knows."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing).__name__ in ("Tensor", "Parameter"):
            storage = thing.untyped_storage()
            if storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def main(script: str, folder: str) -> None:
    rank = os.environ.get("RANK", "0")
    told: dict[str, int] = {}
    older: set[int] = set()
    (watch,) = (thing for thing in gc.get_objects() if type(thing) is StepWatch)  # this rank's own
    spec = importlib.util.spec_from_file_location("script", script)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    build, start, curve = program.build_blocks, watch.sampler._start, sampler.curve

    def begun(clock):
        start(clock)
        told["walked"] = sum(size for address, size in storages().items() if address not in older)
        told["begin"] = handed_out()

    def both(allocations, phases, *rest):
        found = curve(allocations, phases, *rest)
        sums = [sum(sizes) for sizes in zip(*found["owners"].values())]
        moment = (told.pop("moment") - phases[0][1]) / 1e9
        told["curve_begins"] = sums[0]
        told["curve_grown"] = [size for time, size in zip(found["times"], sums) if time <= moment][-1] - sums[0]
        told["peak"], told["buckets"] = found["peak"], sum(map(memory._buckets, watch.memory._replicas()))
        Path(folder, f"peak{rank}.json").write_text(json.dumps(told))
        return found

    def built() -> torch.nn.Module:
        older.update(storages())
        return build()

    def forward_is_over(*_) -> None:
        if watch.sampler._profiler is not None and "grown" not in told:
            time.sleep(0.1)  # until gloo's threads have freed what they sent
            told["grown"], told["moment"] = handed_out() - told.pop("begin"), time.time_ns()

    timeline.MOST = 1_000_000  # no point is left out
    watch.sampler._start, sampler.curve, program.build_blocks = begun, both, built
    loss = program.cross_entropy
    program.cross_entropy = lambda *args, **kwargs: forward_is_over() or loss(*args, **kwargs)
    program.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
