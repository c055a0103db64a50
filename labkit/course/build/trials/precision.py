"""Trials of precision and memory: a mixed-precision step on two ranks, and forward under a limit of memory on one.

The step trains in fp16 with gradients that fp16 cannot hold without loss scaling; in some steps the gradients of one
rank overflow. Forward passes blocks whose activations cost different numbers of bytes to store, and of operations to
recompute.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain, combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import OUTSIDE, Expected, Given, loaded

# ---- what is drawn at grading, and what a single device makes of it


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given."""
    return _draw_step(ranks) if trial == "step" else [_draw_cases() for _ in range(ranks)]


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """What must come out on each rank."""
    return _expect_step(given) if trial == "step" else [_expect_cases(mine) for mine in given]


# ---- a step in mixed precision


WIDTH, LAYERS, SAMPLES, STEPS = 256, 3, 16, 8
_SMALL = 2.0**-11  # what the loss of an ordinary step is multiplied by: without a scale, fp16 rounds its gradients to 0
_SCALES = (2.0**21, 2.0**22, 2.0**23)  # of which one is drawn; with less, some scaled gradients are subnormal
_FAR = 100.0  # a target far from every output, which alone decides whether the gradients overflow
_OVER = 1.4  # by this factor gradients of one step exceed the largest number of fp16, before the scale is halved

UNSCALED = (
    "the gradients are divided by the scale in fp16, which rounds small ones to 0: convert them to fp32 first, then"
    " divide"
)
WITHOUT = "without the scale, fp16 rounds small gradients to 0: multiply the loss by it before backward"
STILL = "after an overflow the scale must be halved, or the next large gradient overflows as well"
WIDE = "the gradients are summed in fp32, which sends twice the bytes: reduce them in fp16, as they are"
SUM = "the gradients are the sum over the ranks, not the mean: divide by the number of ranks"


def _network() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer. Its updates are about as large as the distance of neighbouring numbers in fp16."""
    return torch.optim.Adam(parameters, lr=2e-5, eps=1e-9)


def _draw_step(ranks: int) -> list[Given]:
    """Of each rank `inputs` and `targets`, (steps + 1, samples, width), and `weights` of the losses by step; `scale`
    and the parameters are equal.

    The gradients of one rank overflow in an early step, whatever the scale, and in a later one unless it was halved.
    """
    scale = random.choice(_SCALES)
    early, later = sorted(random.sample(range(2, STEPS - 1), 2))
    parameters = _network().state_dict()
    given: list[Given] = []
    for _ in range(ranks):
        inputs, targets = torch.randn(2, STEPS + 1, SAMPLES, WIDTH)
        weights = torch.full((STEPS,), _SMALL)
        given.append({"inputs": inputs, "targets": targets, "weights": weights, "scale": scale, **parameters})
    largest = torch.finfo(torch.float16).max * SAMPLES * WIDTH / (2 * _FAR * scale)  # weight at which it overflows
    for step, over in ((early, 64.0), (later, _OVER)):
        mine = random.choice(given)
        mine["targets"][step, 0, 0] = _FAR
        mine["weights"][step] = over * largest
    return given


def _expect_step(given: list[Given]) -> list[Expected]:
    """Trains as described on this device: losses of each rank, the final parameters and an output."""
    expected = [Expected() for _ in given]
    right = _trained(given, losses=[rank.losses for rank in expected])
    start = dict(loaded(_network(), given[0]).named_parameters())
    for rank, mine in zip(expected, given):
        rank.expects_parameters(((name, parameter.float()) for name, parameter in right.named_parameters()), start)
        rank.expects("output", right(mine["inputs"][STEPS].half()).float())
    for words, mistake in (
        (WITHOUT, {"scaled": False}),
        (UNSCALED, {"unscales_in_half": True}),
        (STILL, {"halves": False}),
        (SUM, {"mean": False}),
        (WIDE, {"reduced": torch.float32}),
    ):
        wrong = _trained(given, **mistake)
        for rank in expected:
            for name, parameter in wrong.named_parameters():
                rank.mistake(words, f"parameter {name}", parameter.float())
    return expected


def loss_of(model: nn.Module, given: Given, step: int) -> Tensor:
    """The mean squared error of a rank's samples; the model computes in fp16, the loss in fp32."""
    return nn.functional.mse_loss(model(given["inputs"][step].half()).float(), given["targets"][step])


def _trained(
    given: list[Given],
    losses: Sequence[list[float]] = (),
    scaled: bool = True,
    unscales_in_half: bool = False,
    halves: bool = True,
    mean: bool = True,
    reduced: torch.dtype = torch.float16,
) -> nn.Sequential:
    """The fp16 model after all steps, or what becomes of it if something is left out. Adds the losses by rank."""
    model = loaded(_network(), given[0]).half()
    copies = [nn.Parameter(parameter) for parameter in loaded(_network(), given[0]).parameters()]
    optimizer, scale = adam(copies), given[0]["scale"] if scaled else 1.0
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter, dtype=reduced) for parameter in model.parameters()]
        for rank, mine in enumerate(given):
            loss = loss_of(model, mine, step)
            if losses:
                losses[rank].append(loss.item())
            for total, own in zip(sums, torch.autograd.grad(scale * loss * mine["weights"][step], model.parameters())):
                total += own
        if not all(bool(total.isfinite().all()) for total in sums):
            scale = scale / 2 if halves else scale
            continue
        by = scale * (len(given) if mean else 1)
        for copy, total in zip(copies, sums):
            copy.grad = (total / by).float() if unscales_in_half else total.float() / by
        optimizer.step()
        for parameter, copy in zip(model.parameters(), copies):
            parameter.data.copy_(copy.data)
    return model


# ---- forward under a limit of memory


TOKENS, OUTER, BLOCKS, CASES = 1024, 64, 7, 2
_INNER = range(128, 640, 64)
_FUNCTIONS = {"ReLU": 4, "GELU": 8}  # bytes per hidden number: backward of GELU needs its input as well
_UNIT = 4 * TOKENS * _INNER.step  # bytes: what blocks store is a multiple of it
_SPARE = _UNIT // 4  # bytes that the limit leaves to small tensors, such as states of random numbers
_WORSE = 1.04  # naive choices recompute at least this much more than the best one, by operations

Block = tuple[str, list[int]]  # the activation function, and the widths of the hidden layers


def block_of(function: str, inner: Sequence[int]) -> nn.Sequential:
    """Linear layers from width `OUTER` over those of `inner` and back, with a function between them."""
    widths = [OUTER, *inner, OUTER]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), getattr(nn, function)()]
    return nn.Sequential(*layers[:-1])


def stored(block: Block) -> int:
    """Bytes that a block stores for backward, beyond its input, unless it is recomputed."""
    function, inner = block
    return _FUNCTIONS[function] * TOKENS * sum(inner)


def recomputed(block: Block) -> int:
    """Operations of its products if it is recomputed: without the last one, whose output backward does not need."""
    widths = [OUTER, *block[1]]
    return sum(2 * TOKENS * before * after for before, after in pairwise(widths))


def least(blocks: Sequence[Block], budget: float) -> int:
    """The fewest operations with which the blocks that are stored fit into `budget` bytes."""
    costs = [(stored(block), recomputed(block)) for block in blocks]
    subsets = chain.from_iterable(combinations(costs, count) for count in range(len(costs) + 1))
    saved = (sum(cost[1] for cost in kept) for kept in subsets if sum(cost[0] for cost in kept) <= budget)
    return sum(cost[1] for cost in costs) - max(saved)


def _greedy(order: Iterable[Block], budget: float) -> int:
    """The operations if blocks are stored in this order, as long as they fit."""
    again = 0
    for block in order:
        if stored(block) <= budget:
            budget -= stored(block)
        else:
            again += recomputed(block)
    return again


def _draw_case() -> tuple[list[Block], int]:
    """Blocks and a budget with which the usual shortcuts recompute too much."""
    while True:
        blocks = [
            (random.choice(list(_FUNCTIONS)), random.sample(_INNER, random.choice((1, 2)))) for _ in range(BLOCKS)
        ]
        budget = round(random.uniform(0.3, 0.7) * sum(map(stored, blocks)) / _UNIT) * _UNIT
        shortcuts = (
            sorted(blocks, key=lambda block: recomputed(block) / stored(block), reverse=True),
            blocks,
            sorted(blocks, key=stored),
            sorted(blocks, key=stored, reverse=True),
            sorted(blocks, key=recomputed, reverse=True),
        )
        best = least(blocks, budget)
        if best and min(_greedy(order, budget) for order in shortcuts) > _WORSE * best:
            return blocks, budget + _SPARE


def _draw_cases() -> Given:
    """`cases`, blocks and budget of each; `input 0` and `target 0`, (tokens, width), and parameters by case."""
    given: Given = {"cases": [_draw_case() for _ in range(CASES)]}
    for case, (blocks, _) in enumerate(given["cases"]):
        given[f"input {case}"], given[f"target {case}"] = torch.randn(2, TOKENS, OUTER)
        modules = nn.ModuleList(block_of(*block) for block in blocks)
        given[f"parameters {case}"] = modules.state_dict()
    return given


def _modules(given: Given, case: int) -> nn.ModuleList:
    modules = nn.ModuleList(block_of(*block) for block in given["cases"][case][0])
    modules.load_state_dict(given[f"parameters {case}"])
    return modules


def _plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _expect_cases(given: Given) -> Expected:
    """The loss and the gradients of each case."""
    expected = Expected()
    for case in range(CASES):
        blocks = _modules(given, case)
        loss = nn.functional.mse_loss(_plain(blocks, given[f"input {case}"]), given[f"target {case}"])
        loss.backward()
        expected.losses.append(loss.item())
        for name, parameter in blocks.named_parameters():
            expected.expects(f"gradient of case {case}: {name}", parameter.grad)
    return expected


# ---- what runs on the ranks


def step(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model, make_optimizer, scale)` is created with the fp32 model; `step(loss)` is called after forward."""
    model, record = loaded(_network(), given), recorder.record
    for name in model.state_dict():
        del given[name]
    recorder.ignore(given["inputs"], given["targets"])
    recorder.watch(*model.parameters())
    numbers = sum(parameter.numel() for parameter in model.parameters())
    record.figures["numbers"] = numbers
    record.figures["products"] = {}

    def counted(name: str, args: Any) -> None:
        if recorder.step != OUTSIDE:
            for tensor in args:
                for kind in _types([tensor]) if isinstance(tensor, Tensor) else ():
                    record.figures["products"][kind] = record.figures["products"].get(kind, 0) + 1

    recorder.product = counted

    def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        updated = list(parameters)
        record.figures["updated"] = _types(updated)
        return adam(updated)

    training = answer(model, make_optimizer, given["scale"])
    record.figures["computing"] = _types(model.parameters())
    for number in range(STEPS):
        with recorder.during("forward", number):
            loss = loss_of(model, given, number)
        with recorder.during("step", number):
            training.step(loss * given["weights"][number])
        record.losses.append(loss.item())
        del loss
        for parameter in model.parameters():
            parameter.grad = None
        recorder.remember("between two steps", recorder.live_at_rest())
    with recorder.during("output", OUTSIDE):
        recorder.results["output"] = model(given["inputs"][STEPS].half()).float().detach()
    recorder.keep_parameters((name, parameter.float()) for name, parameter in model.named_parameters())


def _types(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def recompute(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(blocks, x, limit)` returns the output of the last block. Each case is a step; its bytes and operations
    are compared with those of the plain forward and backward, and with the best choice."""
    figures = recorder.record.figures
    figures |= {"limit": [], "all": [], "least": []}
    for case, (sizes, budget) in enumerate(given["cases"]):
        blocks, x, target = _modules(given, case), given[f"input {case}"], given[f"target {case}"]
        recorder.watch(x, target, *blocks.parameters())
        with recorder.during("plain", case):
            nn.functional.mse_loss(_plain(blocks, x), target).backward()
        blocks.zero_grad()
        always = len(blocks) * x.nbytes  # the output of each block is the input of the next one
        figures["limit"].append(always + budget)
        figures["all"].append(always + sum(map(stored, sizes)))
        figures["least"].append(least(sizes, budget))
        recorder.rest()
        before = recorder.live_at_rest()
        with recorder.during("forward", case):
            out = answer(blocks, x, always + budget)
        recorder.remember("after forward", recorder.live_at_rest() - before)
        recorder.remember_process("after forward", case)
        with recorder.during("backward", case):
            loss = nn.functional.mse_loss(out, target)
            loss.backward()
        recorder.record.losses.append(loss.item())
        recorder.keep_gradients(f"case {case}", blocks.named_parameters())
        del out, loss, blocks
