"""Trial of weights that go from trainers to samplers, as after each update in reinforcement learning: two ranks hold
fp32 shards of dimension 0, as under FSDP2, and two other ranks need bf16 in a tensor-parallel layout.

A sampler is given no number: whatever it ends with was sent to it.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import Expected, Given

TRAINERS, SAMPLERS, STEPS, LAYERS = 2, 2, 2, 6
COLUMN, ROW = "column", "row"
_WIDTHS = range(129, 193, 2)  # odd: the trainers' shards of a matrix that is split by rows differ in size
_HIDDEN = range(256, 384, 4)
_NAMES = {COLUMN: ("up", "query", "gate"), ROW: ("down", "merge", "out")}

OTHER_DIMENSION = (
    "{names} is split along the other dimension: a weight has the shape (outputs, inputs), and a split by columns gives"
    " each rank a part of the outputs"
)
OTHER_SAMPLER = "{names} is the part of the other sampler: the first trainer and the first sampler have different ranks"
OTHER_ORDER = "the rows of {names} are in the wrong order: those of the first trainer come first"
STALE = "{names} has the weights of the update before: a hand-over sends what the trainers have now"


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given: `matrices`, (rows, columns, split) by name; a trainer its shards of each update, by
    step and name, float32."""
    width, hidden = random.choice(_WIDTHS), random.choice(_HIDDEN)
    matrices = {}
    for layer in range(LAYERS):
        matrices[f"layers.{layer}.{random.choice(_NAMES[COLUMN])}"] = (hidden, width, COLUMN)
        matrices[f"layers.{layer}.{random.choice(_NAMES[ROW])}"] = (width, hidden, ROW)
    matrices = dict(random.sample(list(matrices.items()), len(matrices)))
    weights = [
        {name: torch.randn(rows, columns) for name, (rows, columns, _) in matrices.items()} for _ in range(STEPS)
    ]
    given: list[Given] = [{"matrices": matrices} for _ in range(ranks)]
    for rank in range(TRAINERS):
        for step, whole in enumerate(weights):
            for name, weight in whole.items():
                given[rank][f"{step} {name}"] = weight.chunk(TRAINERS)[rank]
    return given


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """The parts of each sampler after each hand-over, and the shards of each trainer, which stay what they are. There
    is no training, and no loss."""
    expected = [Expected(losses=[0.0] * STEPS) for _ in given]
    before: dict[str, Tensor] = {}
    for step in range(STEPS):
        for name, (_, _, split) in given[0]["matrices"].items():
            shards = [mine[f"{step} {name}"] for mine in given[:TRAINERS]]
            for rank, shard in enumerate(shards):
                expected[rank].expects(f"shard {step} {name}", shard)
            whole = torch.cat(shards).bfloat16()
            for sampler, mine in enumerate(expected[TRAINERS:]):
                label = f"weight {step} {name}"
                mine.expects(label, _part(whole, split, sampler))
                mine.mistake(OTHER_DIMENSION, label, _part(whole, ROW if split == COLUMN else COLUMN, sampler))
                mine.mistake(OTHER_SAMPLER, label, _part(whole, split, SAMPLERS - 1 - sampler))
                mine.mistake(OTHER_ORDER, label, _part(torch.cat(shards[::-1]).bfloat16(), split, sampler))
                if step:
                    mine.mistake(STALE, label, _part(before[name], split, sampler))
            before[name] = whole
    return expected


def _part(whole: Tensor, split: str, sampler: int) -> Tensor:
    """What a sampler has of a weight of the shape (outputs, inputs)."""
    return whole.chunk(SAMPLERS, dim=0 if split == COLUMN else 1)[sampler]


# ---- what runs on the ranks


def hand_over(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(matrices, shards)` is called on every rank after each update; samplers have no shards, and it returns
    their parts by name."""
    record, rank, matrices = recorder.record, dist.get_rank(), given["matrices"]
    numbers = [rows * columns for rows, columns, _ in matrices.values()]
    record.figures |= {"trains": rank < TRAINERS, "whole": 2 * sum(numbers), "largest": 2 * max(numbers), "formats": []}
    parts: dict[str, Tensor] = {}
    for step in range(STEPS):
        shards = {name: given[f"{step} {name}"].clone() for name in matrices} if rank < TRAINERS else {}
        record.figures["shard"] = sum(shard.numel() for shard in shards.values()) * 2
        parts.clear()
        before = recorder.live_at_rest()
        with recorder.during("hand_over", step):
            peak, returned = recorder.peak_since(partial(answer, dict(matrices), dict(shards)))
        recorder.remember("at the peak", peak - before)
        for name, shard in shards.items():
            recorder.results[f"shard {step} {name}"] = shard.clone()
        if rank >= TRAINERS:
            parts |= _checked(returned, matrices)
            record.figures["formats"] += sorted({str(part.dtype).removeprefix("torch.") for part in parts.values()})
            for name, part in parts.items():
                recorder.results[f"weight {step} {name}"] = part.clone()
        del returned
        record.losses.append(0.0)


def _checked(returned: Any, matrices: dict[str, Any]) -> dict[str, Tensor]:
    """What an answer returned on a sampler; `ValueError` unless it is a tensor for each matrix."""
    if not isinstance(returned, dict):
        raise ValueError(f"a sampler must return a dict of tensors by name, got {type(returned).__name__}")
    for name in matrices:
        if not isinstance(returned.get(name), Tensor):
            raise ValueError(f"a sampler must return a tensor for each matrix, got none for {name}")
    return {name: returned[name] for name in matrices}
