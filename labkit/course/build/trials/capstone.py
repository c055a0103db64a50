"""The trial of a mesh: the class `Training` of a script trains a small GPT on 2 data × 2 pipeline × 2 tensor ranks.

A rank is given the parameters of the whole GPT, and of the samples only those of its replica: the tokens if it is in
the first stage, the targets if it is in the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import Expected, Given
from labkit.course.build.starters.mesh_training import (
    BLOCKS,
    DATA,
    HEADS,
    MICRO_BATCHES,
    PIPELINE,
    POSITIONS,
    SAMPLES,
    TENSOR,
    VOCABULARY,
    WIDTH,
    Stage,
    adam,
    part_of,
    split_dimension,
)

STEPS = 2
TIED = "vocabulary.weight"

MICRO = "the gradients of {names} are {MICRO_BATCHES} times too large: divide the loss by the number of micro-batches"
REPLICAS = "the gradients of {names} are the sum over the replicas: divide by the number of data ranks"
SAMPLES_OF_ALL = (
    "the gradients of {names} are the sum over all micro-batches of all replicas: divide by the number of both"
)
WORLD = (
    "the gradients of {names} are divided by the number of all ranks: only the data ranks have other samples, so divide"
    " by their number"
)
AGAIN = "the gradients of {names} are divided by the number of data ranks twice"
OWN_POSITIONS = (
    "the gradients of {names} are those of the rank's own positions: these parameters are replicated over the tensor"
    " group, whose gradients must be summed"
)
MEAN_OF_POSITIONS = (
    "the gradients of {names} are the mean over the tensor group: each of its ranks has the gradient of its own"
    " positions, so add them"
)
SPLIT_AS_WELL = (
    "the gradients of {names} are summed over the tensor group, each rank of which has another part of these parameters"
)
ONE_STAGE = (
    "the gradients of {names} are those of one stage: the first and the last stage use it, so add their gradients"
)
MEAN_OF_STAGES = "the gradients of {names} are the mean of the first and the last stage: add them"


# ---- what is drawn at grading, and what a single device makes of it


def coordinates(rank: int) -> tuple[int, int, int]:
    """Of a rank, those along data, pipeline and tensor."""
    return rank // (PIPELINE * TENSOR), rank // TENSOR % PIPELINE, rank % TENSOR


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given: `parameters`, and `tokens` or `targets`, (steps, micro-batches, positions, samples)."""
    whole = Stage(range(BLOCKS), True, True, None).state_dict()
    for name, parameter in whole.items():
        if "norm" in name or name.endswith("bias"):
            parameter += 0.1 * torch.randn(parameter.shape)
    tokens, targets = torch.randint(VOCABULARY, (2, DATA, STEPS, MICRO_BATCHES, POSITIONS, SAMPLES))
    given = []
    for rank in range(ranks):
        replica, stage, _ = coordinates(rank)
        mine: Given = {f"whole {name}": parameter for name, parameter in whole.items()}
        mine |= {"tokens": tokens[replica]} if stage == 0 else {}
        mine |= {"targets": targets[replica]} if stage == PIPELINE - 1 else {}
        given.append(mine)
    return given


def _parameters(given: Given) -> dict[str, Tensor]:
    """The parameters of the whole GPT, by name."""
    return {name.partition(" ")[2]: tensor for name, tensor in given.items() if name.startswith("whole ")}


@cache
def names_of(stage: int) -> list[str]:
    """The parameters of a pipeline stage."""
    count = BLOCKS // PIPELINE
    blocks = range(stage * count, (stage + 1) * count)
    return list(Stage(blocks, stage == 0, stage == PIPELINE - 1, None).state_dict())


Copies = dict[str, list[Tensor]]  # by name: one for each use of a parameter that adds up to its gradient


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """Trains on the samples of all replicas on this device: the losses, and each rank's parts of the parameters, after
    the first and after the last step."""
    start = _parameters(given[0])
    model = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer, expected = adam(model.values()), [Expected() for _ in given]
    for step in range(STEPS):
        loss, gradients = _gradients(model, given, step)
        for name, parameter in model.items():
            parameter.grad = torch.stack(gradients[name]).sum(0)
        optimizer.step()
        for rank, mine in enumerate(expected):
            mine.losses.append(loss)
            if step in (0, STEPS - 1):
                when = "first" if step == 0 else "parameter"
                for name, part in _parts(model, rank):
                    mine.expects(f"{when} {name}", part, part_of(name, start[name], coordinates(rank)[2], TENSOR))
            if step == 0:
                _mistakes(start, gradients, rank, mine)
    return expected


def _parts(whole: dict[str, Any], rank: int) -> Iterator[tuple[str, Tensor]]:
    """What a rank stores of each parameter, by name."""
    _, stage, tensor = coordinates(rank)
    for name in names_of(stage):
        yield name, part_of(name, whole[name].detach(), tensor, TENSOR)


def _gradients(model: dict[str, nn.Parameter], given: list[Given], step: int) -> tuple[float, Copies]:
    """The mean loss over the samples of all replicas; of each parameter the gradients of its uses: of a replicated one
    those of the positions of each tensor rank, of the vocabulary those of the first and the last stage."""
    copies = {
        name: [parameter.detach().clone().requires_grad_() for _ in range(_uses(name))]
        for name, parameter in model.items()
    }
    tokens, targets = (
        torch.cat([tensor for mine in _replicas(given) for tensor in mine[which][step]], dim=-1)
        for which in ("tokens", "targets")
    )
    loss = _loss(copies, tokens, targets)
    loss.backward()
    return loss.item(), {name: [copy.grad for copy in uses if copy.grad is not None] for name, uses in copies.items()}


def _uses(name: str) -> int:
    if name == TIED:
        return 2
    return 1 if split_dimension(name) is not None else TENSOR


def _replicas(given: list[Given]) -> list[Given]:
    """The tokens and targets of each replica."""
    ranks = PIPELINE * TENSOR
    return [
        {"tokens": given[first]["tokens"], "targets": given[first + ranks - 1]["targets"]}
        for first in range(0, len(given), ranks)
    ]


def _loss(model: Copies, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of the whole GPT for tokens and targets, (positions, samples)."""

    def by_position(name: str) -> Tensor:
        return torch.stack(model[name]).repeat_interleave(POSITIONS // TENSOR, 0)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,)) * by_position(f"{name}.weight") + by_position(f"{name}.bias")

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ model[f"{name}.weight"][0].T

    x = model[TIED][0][tokens] + model["positions"][0]
    for number in range(BLOCKS):
        at = f"blocks.{number}"
        projected = linear(norm(x, f"{at}.norm1"), f"{at}.qkv") + model[f"{at}.qkv.bias"][0]
        q, k, v = projected.view(*tokens.shape, 3, HEADS, -1).permute(2, 1, 3, 0, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + linear(mixed, f"{at}.out") + by_position(f"{at}.out.bias")
        hidden = functional.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.up") + model[f"{at}.up.bias"][0])
        x = x + linear(hidden, f"{at}.down") + by_position(f"{at}.down.bias")
    logits = norm(x, "norm") @ model[TIED][1].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _mistakes(start: dict[str, Tensor], gradients: Copies, rank: int, expected: Expected) -> None:
    """The parts of a rank after the first update, for common mistakes with the gradients."""
    _, stage, tensor = coordinates(rank)
    last = stage == PIPELINE - 1
    for name in names_of(stage):
        uses, whole = gradients[name], torch.stack(gradients[name]).sum(0)
        replicated = split_dimension(name) is None

        def part(value: Tensor, of: int = tensor, name: str = name) -> Tensor:
            return part_of(name, value, of, TENSOR)

        tied = name == TIED
        made = {  # what is halved in some parameters, before what is halved in all
            MEAN_OF_STAGES: part(whole / PIPELINE if tied else whole),
            MEAN_OF_POSITIONS: part(whole / TENSOR if replicated else whole),
            MICRO.replace("{MICRO_BATCHES}", str(MICRO_BATCHES)): part(whole * MICRO_BATCHES),
            REPLICAS: part(whole * DATA),
            SAMPLES_OF_ALL: part(whole * DATA * MICRO_BATCHES),
            WORLD: part(whole / (PIPELINE * TENSOR)),
            AGAIN: part(whole / DATA),
        }
        if replicated:
            made[OWN_POSITIONS] = uses[tensor]
        else:
            made[SPLIT_AS_WELL] = torch.stack([part(whole, of) for of in range(TENSOR)]).sum(0)
        if tied:
            made[ONE_STAGE] = part(uses[last])
        for words, gradient in made.items():
            parameter = nn.Parameter(part(start[name]))
            parameter.grad = gradient
            adam([parameter]).step()
            expected.mistake(words, f"first {name}", parameter)


# ---- what runs on the ranks


def train(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(parameters, make_optimizer)` is created before the first step, `step(tokens, targets)` is called in each,
    and `parameters()` after the first and after the last."""
    _, stage, tensor = coordinates(dist.get_rank())
    inputs = [given.get(which) for which in ("tokens", "targets")]
    parameters = _parameters(given)
    _measures(recorder.record.figures, parameters, stage, tensor)
    given.clear()
    recorder.ignore(*(tensor for tensor in inputs if tensor is not None))
    recorder.watch(*parameters.values())
    training = answer(parameters, adam)
    del parameters
    recorder.remember("after the construction", recorder.live_at_rest())
    for step in range(STEPS):
        with recorder.during("step", step):
            loss = training.step(*(None if tensor is None else tensor[step] for tensor in inputs))
        recorder.record.losses.append(float(loss))
        del loss
        kept = sum(result.nbytes for result in recorder.results.values())
        recorder.remember("between two steps", recorder.live_at_rest() - kept)
        if step in (0, STEPS - 1):
            for name, parameter in training.parameters().items():
                recorder.results[f"{'first' if step == 0 else 'parameter'} {name}"] = parameter.detach().clone()


def _measures(figures: dict[str, Any], whole: dict[str, Tensor], stage: int, tensor: int) -> None:
    """What the judge compares with: bytes of this rank's parts and messages, and operations of its products."""
    parts = {name: part_of(name, whole[name], tensor, TENSOR) for name in names_of(stage)}
    figures["parameters"] = sum(part.nbytes for part in parts.values())
    figures["replicated"] = sum(part.nbytes for name, part in parts.items() if split_dimension(name) is None)
    figures["vocabulary"] = parts[TIED].nbytes
    tokens, blocks = POSITIONS * SAMPLES, BLOCKS // PIPELINE
    figures["activation"], figures["token"] = 4 * tokens * WIDTH, 4 * tokens  # of a micro-batch: bytes of all positions
    matrices = sum(part.numel() for name, part in parts.items() if part.dim() == 2 and name != TIED)
    logits = parts[TIED].numel() if stage == PIPELINE - 1 else 0
    figures["products"] = 3 * 2 * tokens * (matrices + logits) * MICRO_BATCHES
    figures["attention"] = 2 * 2 * tokens * POSITIONS * WIDTH // TENSOR * blocks * MICRO_BATCHES  # in forward
    figures["mesh"] = {"data": DATA, "pipeline": PIPELINE, "tensor": TENSOR}
    figures["micro_batches"], figures["blocks"], figures["stage"] = MICRO_BATCHES, blocks, stage
