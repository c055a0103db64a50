"""Trial of a tensor-parallel plan: a block of attention whose input and output are sharded along the positions, and
which the answer splits with the finished styles of torch. The names of its modules are drawn for each learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import OUTSIDE, Expected, Given

ALLOWED = ("distributed/tensor/", "distributed/_functional_collectives.py")  # finished parts of torch: see rules.py
WIDTH, HEADS, POSITIONS, SAMPLES, STEPS, RATE = 64, 8, 32, 2, 3, 0.5
_PROJECTIONS = ("query", "key", "value")

OWN_POSITIONS = (
    "the gradient of {names} is that of this rank's own positions; which style makes the parameters of a norm DTensors,"
    " whose gradient is a partial sum?"
)
OWN_CHUNK = "no position sees another rank's positions: along which dimension of x is the sequence sharded?"


class Attention(nn.Module):
    """Causal attention of `HEADS` heads, or of those that a rank has. `names` has the modules by role, and `sequence`
    is the dimension of the positions, 0 or 1; the other one is that of the samples."""

    def __init__(self, names: Mapping[str, str], sequence: int):
        super().__init__()
        self._names, self._sequence = names, sequence
        for name in sorted(names[role] for role in (*_PROJECTIONS, "output")):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`; a head sees all positions of `x`."""
        projected = [getattr(self, self._names[role])(x) for role in _PROJECTIONS]
        features = [tensor.shape[-1] for tensor in projected]
        if len(set(features)) > 1:
            raise ValueError(
                f"query, key and value have {', '.join(map(str, features))} features on this rank; split all three in"
                " the same way, so that a rank has whole heads"
            )
        to_heads, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if self._sequence == 0 else ((0, 2, 1, 3), (0, 2, 1, 3))
        heads = [tensor.unflatten(-1, (-1, WIDTH // HEADS)).permute(to_heads) for tensor in projected]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return getattr(self, self._names["output"])(mixed.permute(back).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), with the names of the learner's draw."""

    def __init__(self, names: Mapping[str, str], sequence: int):
        super().__init__()
        self._names = names
        self.add_module(names["norm"], nn.RMSNorm(WIDTH))
        self.add_module(names["attention"], Attention(names, sequence))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`, of which a rank has its positions only."""
        norm, attention = (getattr(self, self._names[role]) for role in ("norm", "attention"))
        out = attention(norm(x))
        if out.shape != x.shape:
            raise ValueError(
                f"{self._names['attention']} returned a tensor of {tuple(out.shape)}, but x has {tuple(x.shape)} on"
                " this rank; the last layer must return the positions of its rank (output_layouts)"
            )
        return x + out


def draw(trial: str, ranks: int, names: Mapping[str, str], sequence: int) -> list[Given]:
    """The draw of the learner; the whole parameters, inputs and targets, (steps + 1, …) in the order of `sequence`."""
    block = Block(names, sequence)
    nn.init.normal_(getattr(block, names["norm"]).weight, 1.0, 0.3)
    shape = (POSITIONS, SAMPLES) if sequence == 0 else (SAMPLES, POSITIONS)
    inputs, targets = torch.randn(2, STEPS + 1, *shape, WIDTH)
    given = {"names": dict(names), "sequence": sequence, "inputs": inputs, "targets": targets}
    return [{**given, "parameters": block.state_dict()} for _ in range(ranks)]


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """What one device makes of all positions: of each rank the loss of its positions, and gradients and outputs."""
    first, ranks = given[0], len(given)
    block, expected = _block(first), [Expected() for _ in given]
    optimizer = torch.optim.SGD(block.parameters(), RATE)
    for step in range(STEPS):
        x, target = first["inputs"][step], first["targets"][step]
        optimizer.zero_grad()
        out = block(x)
        errors = (out - target) ** 2
        errors.mean().backward()
        for rank, mine in enumerate(expected):
            mine.losses.append(_own(errors, first, rank, ranks).mean().item())
            if step == 0:
                mine.expects("output of step 0", _own(out, first, rank, ranks))
                mine.mistake(OWN_CHUNK, "output of step 0", _block(first)(_own(x, first, rank, ranks)))
                for name, parameter in block.named_parameters():
                    mine.expects(f"gradient of step 0: {name}", parameter.grad)
        if step == 0:
            _mistake_of_norm(first, expected)
        optimizer.step()
    for rank, mine in enumerate(expected):
        mine.expects("output", _own(block(first["inputs"][STEPS]), first, rank, ranks))
    return expected


def _mistake_of_norm(given: Given, expected: list[Expected]) -> None:
    """The gradients of the norm if each rank has that of its own positions only."""
    block, names, sequence = _block(given), given["names"], given["sequence"]
    norm, x = getattr(block, names["norm"]), given["inputs"][0]
    weights = [norm.weight.detach().clone().requires_grad_() for _ in expected]
    parts = x.chunk(len(expected), dim=sequence)
    normed = [functional.rms_norm(part, (WIDTH,), weight, norm.eps) for part, weight in zip(parts, weights)]
    out = x + getattr(block, names["attention"])(torch.cat(normed, dim=sequence))
    ((out - given["targets"][0]) ** 2).mean().backward()
    for mine, weight in zip(expected, weights):
        mine.mistake(OWN_POSITIONS, f"gradient of step 0: {names['norm']}.weight", weight.grad)


def _block(given: Given) -> Block:
    block = Block(given["names"], given["sequence"])
    block.load_state_dict(given["parameters"])
    return block


def _own(whole: Tensor, given: Given, rank: int, ranks: int) -> Tensor:
    return whole.chunk(ranks, dim=given["sequence"])[rank]


# ---- what runs on the ranks


def split_block(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(block, mesh)` splits the block in place; it is then trained on this rank's positions."""
    rank, ranks, record = dist.get_rank(), dist.get_world_size(), recorder.record
    block = _block(given)
    numbers = {name: parameter.numel() for name, parameter in block.named_parameters()}
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    answer(block, mesh)
    stored = {name: _local(parameter).numel() for name, parameter in block.named_parameters()}
    norm = f"{given['names']['norm']}.weight"
    record.figures["shares"] = {name: stored.get(name, 0) / count for name, count in numbers.items() if name != norm}
    record.figures["activation"] = POSITIONS * SAMPLES * WIDTH * 4
    record.figures["norm"] = numbers[norm] * 4
    optimizer = torch.optim.SGD(block.parameters(), RATE, foreach=False)  # DTensors and other tensors in one group
    for step in range(STEPS):
        x, target = (_own(given[name][step], given, rank, ranks) for name in ("inputs", "targets"))
        optimizer.zero_grad()
        with recorder.during("forward", step):
            out = block(x)
        with recorder.during("backward", step):
            errors = (out - target) ** 2
            (errors.sum() / (POSITIONS * SAMPLES * WIDTH)).backward()
        if step == 0:
            _keep_gradients(block, recorder)
            recorder.results["output of step 0"] = out.detach()
        with recorder.during("update", step):
            optimizer.step()
        record.losses.append(errors.detach().mean().item())
    with recorder.during("output", OUTSIDE):
        recorder.results["output"] = block(_own(given["inputs"][STEPS], given, rank, ranks)).detach()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _keep_gradients(block: nn.Module, recorder: Recorder) -> None:
    """Whole gradients: those of DTensors are gathered, and partial sums added."""
    with recorder.during("gradients", OUTSIDE):
        for name, parameter in block.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                recorder.results[f"gradient of step 0: {name}"] = whole.clone()
