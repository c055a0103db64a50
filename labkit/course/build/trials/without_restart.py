"""Trials of replicas that are rarely together, or not all there: the outer step of DiLoCo, and recovery within a step
from a replica that is killed.

Each replica trains the same network on its own samples. In the trial of recovery, the first life of one rank is a
process that is forked, and ends by SIGKILL in a step that was drawn; its second life has parameters of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.course.build.ranks.recorder import Recorder
from labkit.course.build.record import OUTSIDE, Expected, Given, loaded
from labkit.course.build.starters.replica import Lighthouse, Manager

WIDTH, SAMPLES, RATE = 64, 8, 0.01
ROUNDS, EVERY = 4, (2, 3)  # of DiLoCo: rounds, and the inner steps of a round, of which one number is drawn
STEPS = 8  # of recovery
_BACK = "back"  # key of the store: the step is about to begin before which the killed rank returns


class Network(nn.Module):
    """Two layers, after an offset that is not trained: a buffer, as a norm has one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width) to (samples, width)."""
        return self.second(torch.tanh(self.first(x - self.offset)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer. Epsilon keeps gradients that are almost zero from deciding."""
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.1, eps=1e-4)


# ---- what is drawn at grading, and what a single device makes of it


def draw(trial: str, ranks: int) -> list[Given]:
    """What each rank is given: `inputs` and `targets`, (steps, samples, width), and the parameters, which are equal.

    For DiLoCo `every`, `rate` and `momentum`. For recovery the rank `victim`, the step `kill` in which it is killed and
    the step `back` in which it is there again; and the parameters of its second life, after "new "."""
    every = EVERY[int(torch.randint(len(EVERY), ()))]
    steps = ROUNDS * every if trial == "outer_step" else STEPS
    shared: dict[str, Any] = {"every": every, "rate": _between(0.4, 0.8), "momentum": _between(0.6, 0.95)}
    if trial == "recovery":
        kill = int(torch.randint(1, 4, ()))
        back = int(torch.randint(kill + 1, STEPS - 1, ()))
        shared = {"victim": int(torch.randint(1, ranks, ())), "kill": kill, "back": back}
    parameters = Network().state_dict()
    given = []
    for _ in range(ranks):
        inputs, targets = torch.randn(2, steps, SAMPLES, WIDTH)
        new = {f"new {name}": tensor for name, tensor in Network().state_dict().items()}
        given.append({"inputs": inputs, "targets": targets, **parameters, **new, **shared})
    return given


def _between(least: float, most: float) -> float:
    return least + (most - least) * float(torch.rand(()))


def _loss(model: nn.Module, given: Given, step: int) -> Tensor:
    return nn.functional.mse_loss(model(given["inputs"][step]), given["targets"][step])


def expect(trial: str, given: list[Given]) -> list[Expected]:
    """Trains all replicas on this device."""
    return {"outer_step": _expect_diloco, "recovery": _expect_recovery}[trial](given)


# ---- DiLoCo

NEVER = "{names} are those of this rank's own replica: nothing moves it to the common point"
MISTAKES: dict[str, dict[str, Any]] = {
    "{names} moved the wrong way: an optimizer subtracts, so that the pseudo-gradient is the common point minus the"
    " replica": {"sign": -1.0},
    "{names} are the mean of the replicas: the outer optimizer, with its rate and momentum, is missing": {"plain": 1.0},
    "{names} are without the outer momentum": {"momentum": 0.0},
    "{names} have momentum, but not Nesterov's": {"nesterov": False},
    "{names} come from the sum of the pseudo-gradients over the ranks, not from their mean": {"summed": True},
    "{names} have momentum that begins anew in each round; it belongs to the outer optimizer, which stays": {
        "forgets": True
    },
}


def _expect_diloco(given: list[Given]) -> list[Expected]:
    losses, point = _diloco(given)
    start = loaded(Network(), given[0])
    expected = [Expected(losses=own) for own in losses]
    wrong = {words: _diloco(given, **mistake)[1] for words, mistake in MISTAKES.items()}
    for number, rank in enumerate(expected):
        alone = loaded(Network(), given[number])
        optimizer = adamw(alone)
        for step in range(len(given[number]["inputs"])):
            optimizer.zero_grad()
            _loss(alone, given[number], step).backward()
            optimizer.step()
        for index, (name, parameter) in enumerate(start.named_parameters()):
            rank.expects(f"parameter {name}", point[index], parameter.detach())
            rank.mistake(NEVER, f"parameter {name}", dict(alone.named_parameters())[name])
            for words, points in wrong.items():
                rank.mistake(words, f"parameter {name}", points[index])
    return expected


def _diloco(
    given: list[Given],
    sign: float = 1.0,
    plain: float = 0.0,
    momentum: float | None = None,
    nesterov: bool = True,
    summed: bool = False,
    forgets: bool = False,
) -> tuple[list[list[float]], list[Tensor]]:
    """Losses by rank and step, and the final common point (Douillard et al. 2023, algorithm 1); with a mistake, if one
    of the arguments says so."""
    every, rate = given[0]["every"], plain or given[0]["rate"]
    momentum = 0.0 if plain else given[0]["momentum"] if momentum is None else momentum
    models = [loaded(Network(), mine) for mine in given]
    optimizers = [adamw(model) for model in models]
    point = [parameter.detach().clone() for parameter in models[0].parameters()]
    velocity = [torch.zeros_like(tensor) for tensor in point]
    losses: list[list[float]] = [[] for _ in given]
    for step in range(len(given[0]["inputs"])):
        for model, optimizer, mine, own in zip(models, optimizers, given, losses):
            optimizer.zero_grad()
            loss = _loss(model, mine, step)
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        if (step + 1) % every:
            continue
        replicas = [[parameter.detach() for parameter in model.parameters()] for model in models]
        for index, common in enumerate(point):
            way = sum(common - replica[index] for replica in replicas) * sign / (1 if summed else len(given))
            velocity[index] = way + (0.0 if forgets else momentum) * velocity[index]
            point[index] = common - rate * (way + momentum * velocity[index] if nesterov else velocity[index])
            for replica in replicas:
                replica[index].copy_(point[index])
    return losses, point


def outer_step(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model, every, rate, momentum)` is created before the first step; `after_step()` is called after each step
    of the inner optimizer."""
    model, record = loaded(Network(), given), recorder.record
    optimizer = adamw(model)
    every = given["every"]
    record.figures |= {"parameters": sum(parameter.nbytes for parameter in model.parameters()), "every": every}
    outer = answer(model, every, given["rate"], given["momentum"])
    digests = []
    for step in range(len(given["inputs"])):
        with recorder.during("inner", step):
            optimizer.zero_grad()
            loss = _loss(model, given, step)
            loss.backward()
            optimizer.step()
        with recorder.during("after_step", step):
            outer.after_step()
        record.losses.append(loss.item())
        digests.append(_digest(*model.parameters()))
    record.figures["digests"] = digests
    recorder.keep_parameters(model.named_parameters())


def _digest(*tensors: Tensor) -> str:
    """The same for tensors that are equal bit by bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(bytes(tensor.detach().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


# ---- recovery

ALL = "the gradients of {names} are divided by the number of ranks at the start: divide by the size of the new quorum"
SUM = "the gradients of {names} are the sum over the quorum, not the mean"
TWICE = "the gradients of {names} are divided twice: start the second attempt from the gradients of backward"
OWN = "the gradients of {names} are those of the rank's own samples"


def _is_alive(given: Given, rank: int, step: int) -> bool:
    """Whether a rank takes part in the update of a step."""
    return rank != given["victim"] or not given["kill"] <= step < given["back"]


def _is_compared(given: Given, rank: int, step: int) -> bool:
    """Whether the gradients of a rank in a step are compared: of the first step, and from the one with the kill on."""
    return step >= given["kill"] or (step == 0 and rank != given["victim"])


def _expect_recovery(given: list[Given]) -> list[Expected]:
    model, expected = loaded(Network(), given[0]), [Expected() for _ in given]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(model)
    for step in range(STEPS):
        there = [rank for rank, mine in enumerate(given) if _is_alive(mine, rank, step)]
        own = {}
        for rank in there:
            loss = _loss(model, given[rank], step)
            own[rank] = torch.autograd.grad(loss, list(model.parameters()))
            expected[rank].losses.append(loss.item())
        for rank in set(range(len(given))) - set(there):
            expected[rank].losses.append(0.0)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            mean = sum(gradients[index] for gradients in own.values()) / len(there)
            parameter.grad = mean
            for rank in there:
                if not _is_compared(given[rank], rank, step):
                    continue
                result = f"gradient of step {step}: {name}"
                expected[rank].expects(result, mean)
                if step == 0:
                    expected[rank].mistake(SUM, result, mean * len(there))
                    expected[rank].mistake(OWN, result, own[rank][index])
                if step == given[rank]["kill"]:
                    expected[rank].mistake(ALL, result, mean * len(there) / len(given))
                    expected[rank].mistake(TWICE, result, mean / len(given))
        optimizer.step()
    for rank in expected:
        rank.expects_parameters(model.named_parameters(), start)
    return expected


def recovery(answer: Any, recorder: Recorder, given: Given) -> None:
    """`answer(model, optimizer, backward, manager, step)` trains one step and returns the next one."""
    rank, ranks, kill, back = dist.get_rank(), dist.get_world_size(), given["kill"], given["back"]
    victim = rank == given["victim"]
    lighthouse = Lighthouse(ranks) if rank == 0 else None
    meeting = [lighthouse.port, tempfile.mkdtemp(prefix="labkit-quorum-")] if lighthouse else [0, ""]
    dist.broadcast_object_list(meeting, src=0)
    port, folder = meeting
    model = loaded(Network(), given)
    figures = recorder.record.figures
    figures |= {name: given[name] for name in ("victim", "kill", "back")}
    figures["parameters"] = sum(parameter.nbytes for parameter in model.parameters())
    figures["state"] = 3 * figures["parameters"] + model.offset.nbytes
    losses: list[float] = []
    if victim:
        losses = _first_life(recorder, partial(_live, answer, recorder, given, port, folder), kill)
        recorder.record.losses += losses + [0.0] * (back - kill)
        store = dist.distributed_c10d._get_default_store()
        _wait_until(recorder, lambda: store.check([_BACK]))
        _live(answer, recorder, given, port, folder, back)
    else:
        _live(answer, recorder, given, port, folder, 0, lighthouse)
    with recorder.during("recovery", OUTSIDE):
        dist.barrier()
    if lighthouse:
        figures |= {"rounds": lighthouse.rounds, "updates": lighthouse.updates}
        lighthouse.shutdown()
        lighthouse.server_close()
        shutil.rmtree(folder, ignore_errors=True)


def _live(
    answer: Any,
    recorder: Recorder,
    given: Given,
    port: int,
    folder: str,
    begins: int,
    lighthouse: Lighthouse | None = None,
    dies: Callable[[float], None] | None = None,
) -> None:
    """A life of a replica, from step `begins` on: without knowing which step it is, unless it is the first. `dies` is
    called with the loss of each backward."""
    model = loaded(Network(), given, "new " if begins else "")
    optimizer = adamw(model)
    figures, losses = recorder.record.figures, recorder.record.losses
    calls = figures.setdefault("backwards", {})
    manager = _Counting(port, folder)

    def backward(step: int) -> float:
        calls[str(step)] = calls.get(str(step), 0) + 1
        optimizer.zero_grad()
        loss = _loss(model, given, step)
        loss.backward()
        if dies:
            dies(loss.item())
        elif step == len(losses):
            losses.append(loss.item())
        return loss.item()

    def updates(*_: Any) -> None:
        if not manager.agreed:
            figures.setdefault("unagreed", recorder.step)
        manager.agreed = False

    optimizer.register_step_pre_hook(updates)
    for step in range(begins, STEPS):
        if lighthouse and step == given["back"]:
            dist.distributed_c10d._get_default_store().set(_BACK, "now")
            others = dist.get_world_size() - 1
            _wait_until(recorder, lambda others=others: len(lighthouse.waiting) >= others)
        with recorder.during("step", step):
            reached = answer(model, optimizer, backward, manager, 0 if step == begins else step)
        if reached != step + 1:
            raise ValueError(f"the answer returned {reached!r} after step {step}, expected {step + 1}, the next step")
        if _is_compared(given, dist.get_rank(), step):
            recorder.keep_gradients(f"step {step}", model.named_parameters())
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        moments = [state[name] for state in states for name in sorted(state)]
        figures.setdefault("digests", {})[str(step)] = {
            "parameters": _digest(*model.parameters()),
            "buffers": _digest(*model.buffers()),
            "optimizer state": _digest(*moments),
        }
    if not dies:
        recorder.keep_parameters(model.named_parameters())


class _Counting(Manager):
    """Notes whether the last vote was for the update."""

    agreed = False

    def quorum(self, step: int) -> tuple[dist.ProcessGroup, list[int]]:
        """As that of `Manager`. The group is registered, because torch names it when it reports an error."""
        group, steps = super().quorum(step)
        world = dist.distributed_c10d._world
        world.pg_map[group], world.pg_names[group] = ("gloo", None), "quorum"
        world.pg_group_ranks[group] = {number: number for number in range(group.size())}
        return group, steps

    def commit(self, ok: bool) -> bool:
        """As that of `Manager`."""
        self.agreed = super().commit(ok)
        return self.agreed


def _wait_until(recorder: Recorder, done: Callable[[], bool]) -> None:
    """Waits for other processes: a wait that is not the answer's, and that its watchdog does not count."""
    while not done():
        recorder.calls += 1
        time.sleep(0.005)


def _first_life(recorder: Recorder, live: Callable[..., None], kill: int) -> list[float]:
    """Runs `live` in a forked process, which is killed by SIGKILL in step `kill` after its backward. Returns its losses
    before that step."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        threading.Thread(target=_end_with, args=[parent], daemon=True).start()
        losses: list[float] = []

        def dies(loss: float) -> None:
            if len(losses) == kill:
                os.write(writing, json.dumps(losses).encode())
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(loss)

        try:
            live(0, dies=dies)
            words = "has ended before it could be killed: does it call backward once per step?"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(words).encode())
        os._exit(1)
    os.close(writing)
    _wait_until(recorder, lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    with open(reading, "rb") as pipe:
        said = json.loads(pipe.read() or b'"the process has ended without a word"')
    if isinstance(said, str):
        raise RuntimeError(f"in its first life, {said}")
    return list(said)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)
