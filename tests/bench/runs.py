"""Paired runs: the lab, plain torchrun, traceml-ai, hand-written scripts, one rank and two."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from bench.pairs import (
    FIRST,
    LAST,
    Times,
    in_turn,
    started_warm,
    under_the_lab,
    under_torchrun,
    under_traceml,
)
from bench.results import PAIRS, Result, ratio
from labkit.launch.warm import client
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.runs.handle import run
from labkit.setup.machine import Machine

_STEPS = 40

_STRATEGIES = ("ddp", "fsdp2", "tp", "pp")


# ---- a run under the lab vs. the same script under plain torchrun

_TINY = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
for step in range(3000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""

_WARM_STEPS = 25

_RUNS = 100  # with one server

_PIPELINES = 200

_APPEARS = 60.0  # seconds within which the server must be ready

_FEW = 3  # pairs per strategy and workload; there are also figures over all of them

# per rank: small, so that the benchmark takes minutes, which makes relative costs larger
_BATCHES = {"cnn": 32, "gpt": 4}

_ASPECTS = {  # fields of Times: description and target; the cost of profiling shows only in the mean
    "step": ("steps, median", "≤ 1.02"),
    "mean": ("steps, mean", "≤ 1.03"),
    "cpu": ("CPU time of steps, median", ""),
    "cpu_mean": ("CPU time of steps, mean", ""),
    "first": ("time to first step", "≤ 1.05"),
    "whole": ("whole command", ""),
}


def overhead() -> list[Result]:
    """A run under the lab vs. plain torchrun, paired: its steps (including profiled ones), time to first step, total
    time.
    """
    figures, labs, bares = [], [], []
    scripts = {
        f"{strategy}, {workload}": _short(strategy, workload) for workload, strategy in product(_BATCHES, _STRATEGIES)
    }
    for name, script in scripts.items():
        lab, bare = in_turn({"lab": (under_the_lab, script), "bare": (under_torchrun, script)}, 2, _FEW)
        labs, bares = labs + lab, bares + bare
        figures += _compared(name, "lab", lab, bare, "step", "mean", "cpu", "cpu_mean")
    figures += _compared("all of these", "lab", labs, bares, *_ASPECTS)
    sides = {"lab": (partial(under_the_lab, sample_every=0), _TINY), "bare": (under_torchrun, _TINY)}
    tiny = [(under.step - without.step) * 1e6 for under, without in zip(*in_turn(sides, nproc=1))]
    share = statistics.median(tiny) / statistics.median(bare.step for bare in bares) / 1e4
    note = f"always on; measured with 3,000 steps of a tiny model; {share:.2f} % of the median step above"
    return [*figures, Result("cost of the probe per step", statistics.median(tiny), "µs", "small", tuple(tiny), note)]


_LOOKED_AT = (("ddp", "mlp", 400), ("ddp", "cnn", 200), ("fsdp2", "gpt", 100))


def looks() -> list[Result]:
    """The share of the time of training that the probe's looks at the model take, on the rank where they take most."""
    figures = []
    for strategy, workload, steps in _LOOKED_AT:
        shares = []
        for _ in range(_FEW):
            handle = run(strategy, workload=workload, nproc=2, device="cpu", steps=steps, cold=True).wait()
            for rank in handle.state.ranks.values():
                first, last = rank.looks[0], rank.looks[-1]
                shares.append(100 * last.spent / (last.t - first.t))
        most = [max(pair) for pair in zip(shares[::2], shares[1::2])]
        name = f"{strategy}, {workload}: looks / time of training"
        figures.append(Result(name, statistics.median(most), "%", "≤ 0.5 %", tuple(most), f"2 ranks, {steps} steps"))
    return figures


def _short(strategy: str, workload: str) -> str:
    """A generated script that trains with small batches up to the last measured step, on two CPU ranks."""
    batch = _BATCHES[workload]
    spec = Spec(strategy, workload, nproc=2, steps=LAST, batch_size=batch, samples=2 * batch * LAST, device="cpu")
    return write_script(spec.on(Machine.here()))


def _compared(what: str, side: str, under: list[Times], bare: list[Times], *fields: str) -> list[Result]:
    """The ratios of one side's times to those under plain torchrun, and their differences."""
    figures = []
    for field in fields:
        words, aim = _ASPECTS[field]
        usual = statistics.median(getattr(times, field) for times in bare)
        more = statistics.median(getattr(one, field) - getattr(other, field) for one, other in zip(under, bare))
        note = f"torchrun: {usual * 1000:,.1f} ms; {more * 1000:+,.2f} ms"
        name = f"{what}: {words}, {side} / torchrun"
        figures.append(ratio(name, _ratios(under, bare, field), aim if side == "lab" else "", note))
    return figures


def _ratios(under: list[Times], bare: list[Times], field: str) -> list[float]:
    return [getattr(one, field) / getattr(other, field) for one, other in zip(under, bare)]


# ---- a warm start


def warm_starts() -> list[Result]:
    """A warm start vs. plain torchrun and a cold start of the same script: time to first step, and step time."""
    figures, warms, colds = [], [], []
    _wait_for_server()
    for workload, strategy in product(("cnn", "gpt"), ("ddp", "fsdp2")):
        script = write_script(Spec(strategy, workload, nproc=2, steps=_WARM_STEPS, device="cpu").on(Machine.here()))
        sides = {"warm": (started_warm, script), "bare": (under_torchrun, script), "cold": (under_the_lab, script)}
        warm, bare, cold = in_turn(sides, 2)
        warms, colds = warms + warm, colds + cold
        name = f"{strategy}, {workload} × 2: time to first step"
        seconds = [one.first for one in warm]
        note = f"torchrun: {statistics.median(one.first for one in bare):.2f} s"
        figures.append(Result(f"{name}, warm", statistics.median(seconds), "s", "≤ 2.5 s", tuple(seconds), note))
        figures.append(ratio(f"{name}, warm / torchrun", _ratios(warm, bare, "first"), "≤ 0.5", note))
        figures.append(ratio(f"{name}, cold / torchrun", _ratios(cold, bare, "first"), "≤ 1.05", note))
    note = f"all of the above; {_WARM_STEPS} steps without the first {FIRST - 1}"
    return [*figures, ratio("steps, median, warm / cold", _ratios(warms, colds, "step"), "0.98 to 1.02", note)]


def one_server() -> list[Result]:
    """Sequential runs with one server: the growth of the server's resources between the first and the last run."""
    server = psutil.Process(_wait_for_server()["pid"])
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        script.write_text(_TINY.replace("3000", "3"))
        seen = []
        for _ in range(_RUNS + 1):
            started_warm(script, 2)
            seen.append((server.num_fds(), server.num_threads(), server.memory_info().rss))
    descriptors, threads, memory = (last - first for first, last in zip(seen[0], seen[-1]))
    note = f"after {_RUNS} more runs of 2 ranks"
    return [
        Result("descriptors of the warm server", descriptors, "more", "0", (), note),
        Result("threads of the warm server", threads, "more", "0", (), note),
        Result("memory of the warm server, growth", memory / 2**20, "MiB", "≤ 5", (), note),
        Result("memory of the warm server", seen[-1][2] / 2**20, "MiB", "≤ 381", (), "resident"),
    ]


def profiled() -> list[Result]:
    """Pipelines that profile every step, alternating cold and warm: the number of runs that did not finish."""
    _wait_for_server()
    ends = []
    for number in range(_PIPELINES):
        handle = run(
            "pp",
            workload="mlp",
            nproc=2,
            device="cpu",
            steps=6,
            batch_size=8,
            samples=64,
            sample_every=1,
            cold=bool(number % 2),
        )
        ends.append(float(handle.wait().words != "finished"))
    note = f"in total, of {_PIPELINES}; half of them warm"
    return [Result("pipelines that profile every step", sum(ends), "crashes", "0", tuple(ends), note)]


def _wait_for_server() -> dict[str, Any]:
    client.prepare()
    last = time.monotonic() + _APPEARS
    while isinstance(found := client.about(), client.Cold):
        if time.monotonic() > last:
            raise RuntimeError(f"the warm server was not ready within {_APPEARS:g} s")
        time.sleep(0.1)
    return found


# ---- the package traceml-ai on the same script


_TRAINS = "loss = train_step(model, optimizer, inputs, targets)"

_TRACED = "import traceml_ai\ntraceml_ai.init(mode='auto')\n"

_VERSION = "import sklearn, torch, traceml_ai; from importlib.metadata import version; print(version('traceml-ai'))"

_HOW = (
    "not measured; pip install traceml-ai torch scikit-learn in a separate environment, "
    "and set LABKIT_BENCH_TRACEML=…/bin/python"
)


def traceml() -> list[Result]:
    """The package traceml-ai and the lab with the same script, each vs. plain torchrun of its environment, paired."""
    python = shutil.which(os.environ.get("LABKIT_BENCH_TRACEML", sys.executable))
    asked = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, check=False) if python else None
    if asked is None or asked.returncode:
        return [Result("steps, traceml-ai / torchrun", None, "×", "", (), _HOW)]
    theirs, figures = f"traceml-ai {asked.stdout.strip()}", []
    for workload in _BATCHES:
        script = _short("ddp", workload)
        before, after = script.split(_TRAINS)  # a custom loop must mark its steps
        sides = {
            "lab": (under_the_lab, script),
            "bare": (under_torchrun, script),
            "traceml": (
                partial(under_traceml, python=python),
                f"{_TRACED}{before}with traceml_ai.trace_step(model): {_TRAINS}{after}",
            ),
            "bare there": (partial(under_torchrun, python=python), script),
        }
        lab, bare, traced, there = in_turn(sides, 2, _FEW)
        figures += _compared(f"ddp, {workload}", "lab", lab, bare, *_ASPECTS)
        figures += _compared(f"ddp, {workload}", theirs, traced, there, *_ASPECTS)
    return figures


# ---- generated scripts vs. hand-written ones


def generated_scripts() -> list[Result]:
    """Step time of the generated scripts vs. hand-written ones in plain PyTorch, both under plain torchrun."""
    figures = []
    for strategy in _STRATEGIES:
        script = write_script(Spec(strategy, nproc=2, steps=_STEPS, device="cpu").on(Machine.here()))
        by_hand = (Path(__file__).parent / "by_hand" / f"{strategy}.py").read_text(encoding="utf-8")
        sides = {"generated": (under_torchrun, script), "hand-written": (under_torchrun, by_hand)}
        ours, theirs = in_turn(sides, nproc=2)
        milliseconds = statistics.median(times.step for times in theirs) * 1000
        note = f"× 2, cnn, {_STEPS} steps; hand-written: {milliseconds:.1f} ms per step"
        figures.append(
            ratio(f"step time of {strategy}, generated / hand-written", _ratios(ours, theirs, "step"), "≤ 1.01", note)
        )
    return figures


# ---- two ranks vs. one


def scaling() -> list[Result]:
    """Samples per second of DDP on two CPU ranks vs. one, one thread each, on the 60,000 digits, and the limiting
    phase.
    """
    ratios, phases = [], {1: [], 2: []}
    for pair in range(PAIRS):
        speed = {}
        for nproc in sorted((1, 2), reverse=bool(pair % 2)):
            summary = run("ddp", nproc=nproc, steps=_STEPS, device="cpu").wait().summary()
            speed[nproc] = summary["samples_per_second"]
            phases[nproc].append(summary["ranks"][0]["phase_seconds"])
        ratios.append(speed[2] / speed[1])
    grown = {
        phase: (
            statistics.median(each[phase] for each in phases[2]) - statistics.median(each[phase] for each in phases[1])
        )
        for phase in phases[1][0]
    }
    worst = max(grown, key=grown.__getitem__)
    note = (
        f"one thread and batch size 128 per rank; {worst} grows most: {grown[worst] * 1000:+.1f} ms per step; one"
        " rank: "
        + ", ".join(
            f"{phase} {statistics.median(each[phase] for each in phases[1]) * 1000:.1f}" for phase in phases[1][0]
        )
    )
    return [ratio("samples per second, ddp × 2 / ddp × 1", ratios, "≤ 2.00", note + " ms")]
