"""What the script does that only shows when ranks are laid side by side: `saw` events, a few in a run, none of which costs a step much.

======= ============================================ =====================================================================
what    fields                                       when
======= ============================================ =====================================================================
model   name, units (of FSDP), parameters            a model trains for the first time
loader  batches, samples, sampler (a class)          an iteration over a DataLoader begins
epoch   sampler, set (by `set_epoch`), shuffle, ranks an iteration over a DistributedSampler begins
batch   step, digest                                 in the first steps: a digest of the first tensor of the batch
item    calls                                        `.item()` was called between phases in as many of the first 20 steps
save    path, step                                   the script calls `torch.save` with a path
======= ============================================ =====================================================================
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from labkit.probe.journal import Guard, Journal
from labkit.probe.memory import tensors_in

_BATCHES = 3  # batches that are digested
_ITERATIONS = 4  # iterations over loaders and samplers that are told of
_DIGESTED = 1 << 16  # bytes of a batch
_ITEMS = 20  # steps in which calls of item are counted
_SAVES = 50
_UNITS = ("FSDPModule", "FullyShardedDataParallel")


class Observations:
    """Tells the journal; `step` gives the steps that were finished, `between` whether the script is in no phase."""

    def __init__(self, journal: Journal, step: Callable[[], int], between: Callable[[], bool]):
        self._journal, self._guard = journal, Guard(journal, "observations")
        self._step, self._between = step, between
        self._left = {"loader": _ITERATIONS, "epoch": _ITERATIONS, "batch": _BATCHES, "save": _SAVES}
        self._stepped: set[int] = set()
        self._samplers: dict[int, int] = {}
        self._iterations()
        self._items()
        self._saves()

    def model(self, model: torch.nn.Module) -> None:
        """A model trains for the first time."""
        units = sum(any(kind.__name__ in _UNITS for kind in type(part).__mro__) for part in model.modules())
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._journal.write("saw", what="model", name=type(model).__name__, units=units, parameters=parameters)

    def batch(self, values: Any) -> None:
        """A batch has come."""
        if self._left["batch"]:
            self._guard(self._digest, values)

    def _digest(self, values: Any) -> None:
        tensor = next(tensors_in(values), None)
        if tensor is None or tensor.device.type != "cpu" or not tensor.numel():
            return
        rows = tensor.detach()[:16] if tensor.dim() else tensor.detach()
        data = rows.contiguous().view(torch.uint8).numpy().tobytes()[:_DIGESTED] if rows.dim() else str(rows.item()).encode()
        self._tell("batch", step=self._step() + 1, digest=hashlib.blake2b(data, digest_size=8).hexdigest())

    def _tell(self, what: str, **fields: Any) -> None:
        if self._left[what]:
            self._left[what] -= 1
            self._journal.write("saw", what=what, **fields)

    # ---- what is wrapped

    def _iterations(self) -> None:
        load, sample = DataLoader.__iter__, DistributedSampler.__iter__

        @functools.wraps(load)
        def iterate_loader(loader: Any) -> Any:
            self._guard(self._loader, loader)
            return load(loader)

        @functools.wraps(sample)
        def iterate_sampler(sampler: Any) -> Any:
            self._guard(self._epoch, sampler)
            return sample(sampler)

        DataLoader.__iter__, DistributedSampler.__iter__ = iterate_loader, iterate_sampler

    def _epoch(self, sampler: Any) -> None:
        which = self._samplers.setdefault(id(sampler), len(self._samplers))
        self._tell("epoch", sampler=which, set=int(sampler.epoch), shuffle=bool(sampler.shuffle), ranks=int(sampler.num_replicas))

    def _loader(self, loader: Any) -> None:
        sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
        sampler = getattr(sampler, "sampler", sampler)  # a BatchSampler in the sampler's place
        batches, samples = (_length(thing) for thing in (loader, loader.dataset))
        self._tell("loader", batches=batches, samples=samples, sampler=type(sampler).__name__)

    def _items(self) -> None:
        original, mine = torch.Tensor.item, threading.get_ident()

        @functools.wraps(original)
        def item(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == mine and self._between():
                self._guard(self._count_item)
            return original(tensor)

        torch.Tensor.item = item

    def _count_item(self) -> None:
        step = self._step()
        if 1 < step <= _ITEMS + 1:
            self._stepped.add(step)
        elif self._stepped and step > _ITEMS + 1:
            self._journal.write("saw", what="item", calls=len(self._stepped), steps=_ITEMS)
            self._stepped = set()

    def _saves(self) -> None:
        original = torch.save

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, (str, os.PathLike)):
                self._guard(lambda: self._tell("save", path=str(Path(f).absolute()), step=self._step()))
            return original(obj, f, *args, **kwargs)

        torch.save = torch.serialization.save = save


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None
