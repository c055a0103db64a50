"""The parts of the probe that can be lost one by one, and what is not measured without each.

A part is lost after its first exception, or if torch or Python lacks a name that it relies on. The `probe_error` event
names the part, and in the second case says what is not measured.
"""

from __future__ import annotations

import importlib
import platform
import sys
from typing import Any

LOST = {
    "allocator warnings": "torch's allocator prints warnings while the memory of a step is profiled",
    "bucket sizes": "the memory of DDP's buckets is not counted",
    "builds": "the compilation of C++ extensions is not shown as an activity",
    "calls of item": "calls of `.item()` between phases are not counted",
    "collectives": "traffic is not measured, and hangs are reported without their collectives",
    "compiled code": "torch.compile may trace and compile functions of the probe, which slows down the first steps",
    "compiled updates": "optimizer steps that the script compiles after it has begun to train are not found",
    "copies to the GPU": "the time of copying batches to the GPU counts as `other`",
    "data loaders": "the sizes and samplers of data loaders are not compared across ranks",
    "data loading": "the data phase is not measured, and samples are counted from the inputs of the models",
    "halves of backward": "the losses and most backward passes of zero-bubble pipelines are not measured",
    "looks": "replicas that differ, steps without effect and the like are not found",
    "loss shares": "the loss of a step with several backwards is their mean, even if the script scales them itself",
    "loopback": "the store of the ranks listens on every interface",
    "memory curves": "profiled steps have no memory curve",
    "metrics": "values that the script reports are not recorded",
    "open records": "a profile may write to freed memory, so steps are not profiled",
    "optimizers": "the losses of several optimizers are not kept apart, and updates without hooks are not found",
    "process groups": "data that needs the process group may be missing if the script destroys it",
    "processes": "processes that the script starts are not recorded",
    "restored states": "steps that a script repeats from an earlier state are not named",
    "saved files": "paths that are passed to `torch.save` are not recorded",
    "scaled losses": "losses that pass through a gradient scaler are recorded as scaled",
    "sends": "point-to-point sends are not counted in the traffic",
    "short rendezvous": "warm starts take a few tenths of a second longer",
    "snapshots": "requested snapshots of the CUDA allocator are not written",
    "hosts": "the hosts of other nodes are not known",
    "startup": "milestones before the first step are not recorded",
    "steps": "steps, phases and losses are incomplete or missing",
    "tensors": "gradients and parameters are not stored, so the equivalence of runs is not judged",
    "timelines": "steps are not profiled, so there are no timelines, exposed communication or memory curves",
    "traces": "memory and traffic are predicted by formulas only, and those of your own scripts are not",
    "tensor versions": "changes of tensors are not counted, so some updates without hooks are not found",
    "weights of losses": "losses that are means over different numbers of elements are not found",
    "warm starts": "runs start cold",
}


class MissingName(AttributeError):
    """torch or Python has no such name; `part` of the probe is lost."""

    def __init__(self, name: str, part: str):
        library = name.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        owner = f"{library} {version}" if version else f"Python {platform.python_version()}"
        super().__init__(f"{owner} has no {name}: {LOST[part]}")
        self.part = part


def find(name: str, part: str) -> Any:
    """The object with a dotted name; imports modules that are not loaded yet. Raises `MissingName`."""
    path, *rest = name.split(".")
    found = importlib.import_module(path)
    for attribute in rest:
        path = f"{path}.{attribute}"
        if path in sys.modules:  # torch.distributed.rendezvous is also a function
            found = sys.modules[path]
        elif hasattr(found, attribute):
            found = getattr(found, attribute)
        else:
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise MissingName(name, part) from None
    return found
