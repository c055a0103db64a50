"""If LABKIT_TENSORS=1: writes every rank's shards of the gradients before the first optimizer step, and of the
parameters at the end.

`<run>/tensors/rank<r>-gradients.npz` and `rank<r>-parameters.npz` contain float32 arrays and one member `index`, JSON
text as uint8: a list of {key, name, shape, kind}. `name` and `shape` are those of the whole model's parameter; `kind`
is the layout of the array `key` in it: "block" at `offset` (one number per dimension), "flat" from `start` of the
flattened parameter, or "partial": a block at `offset` that must be summed with those of other ranks. A rank writes its
own shards without communication, so it cannot hang.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.probe.journal import Guard, Journal
from labkit.probe.memory import local
from labkit.probe.torch_private import (
    FLAT_INFOS,
    FLAT_SHAPES,
    FLAT_SHARDS,
    FLAT_TENSORS,
    FSDP_HANDLE,
    SHARD_OFFSET,
    WRAPPERS,
)
from labkit.probe.traffic import GroupWatch

Piece = tuple[dict[str, Any], torch.Tensor]


class TensorWatch:
    """Writes the gradients once and the parameters once; `models` returns the trained modules."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        rank: int,
        journal: Journal,
        groups: GroupWatch,
        models: Callable[[], list[nn.Module]],
    ):
        self._head = Path(run) / "tensors" / f"rank{rank}"
        self._models = models
        # a training function may return, and free its model, before the parameters are written
        self._kept: list[nn.Module] = []
        self._guard = Guard(journal, "tensors")
        self._written: set[str] = set()
        groups.before_end(self._group_ends)

    def optimizer_begins(self) -> None:
        """An optimizer is about to step; writes the gradients before the first step."""
        self._guard(self._write, "gradients")

    def script_ends(self) -> None:
        self._guard(self._write, "parameters")

    def _group_ends(self) -> None:
        """The script destroys its process group; ignored if an error is being handled, as in a `finally` block."""
        if sys.exc_info()[0] is None:
            self.script_ends()

    def _write(self, what: str) -> None:
        if what in self._written:
            return
        self._written.add(what)
        import numpy

        arrays, index = {}, []
        with torch.no_grad():
            self._kept = self._kept or outermost(self._models())
            for model in self._kept:
                for piece, tensor in pieces(model, what == "gradients"):
                    key = f"a{len(index)}"
                    arrays[key] = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
                    index.append({"key": key, **piece})
        self._head.parent.mkdir(exist_ok=True)
        text = numpy.frombuffer(json.dumps(index).encode(), dtype=numpy.uint8)
        numpy.savez(f"{self._head}-{what}.npz", index=text, **arrays)


def outermost(models: list[nn.Module]) -> list[nn.Module]:
    """The models that are not submodules of another one."""
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    return [model for model in models if id(model) not in inner]


def pieces(model: nn.Module, gradients: bool) -> Iterator[Piece]:
    """This rank's shards of a model's parameters, or of their gradients if there are any."""
    held: set[int] = set()
    for prefix, handle in _flat_handles(model):
        held |= {id(handle.flat_param), *map(id, FLAT_TENSORS.of(handle.flat_param) or ())}
        yield from _flat_pieces(prefix, handle, gradients)
    for name, parameter in model.named_parameters():
        if id(parameter) in held or hasattr(parameter, "ds_id"):  # DeepSpeed's stage 3 has its own sharding format
            continue
        tensor = parameter.grad if gradients else parameter
        if tensor is not None:
            yield {"name": plain(name), **_place(tensor)}, _here(tensor)


def plain(name: str) -> str:
    """A parameter's name in the unwrapped model."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    mine = local(tensor)
    return mine.wait() if hasattr(mine, "wait") else mine  # wait for a collective that was already started


def _place(tensor: torch.Tensor) -> dict[str, Any]:
    if not hasattr(tensor, "placements"):
        return {"shape": list(tensor.shape), "kind": "block", "offset": [0] * tensor.dim()}
    kind = "partial" if any(placement.is_partial() for placement in tensor.placements) else "block"
    _, offset = SHARD_OFFSET.get()(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"shape": list(tensor.shape), "kind": kind, "offset": list(offset)}


def _flat_handles(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and handle of each unit of FullyShardedDataParallel that has parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for prefix, module in model.named_modules() if fsdp else ():
        if isinstance(module, fsdp.FullyShardedDataParallel) and (handle := FSDP_HANDLE.of(module)) is not None:
            yield prefix, handle


def _flat_pieces(prefix: str, handle: Any, gradients: bool) -> Iterator[Piece]:
    """The shards of an FSDP unit's flat parameter, with or without `use_orig_params`."""
    flat = handle.flat_param
    shard, tensors = flat.grad if gradients else flat, FLAT_TENSORS.of(flat)
    units = zip(FLAT_INFOS.of(flat), FLAT_SHAPES.of(flat), FLAT_SHARDS.of(flat))
    for number, (info, shape, place) in enumerate(units):
        if not place.in_shard:
            continue
        if gradients and tensors is not None:
            tensor = tensors[number].grad
        elif shard is None:
            tensor = None
        else:
            tensor = shard.reshape(-1)[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard]
        if tensor is not None:
            name = plain(f"{prefix}.{info.module_name}.{info.param_name}")
            yield (
                {"name": name, "shape": list(shape), "kind": "flat", "start": place.intra_param_start_idx},
                tensor.reshape(-1),
            )
