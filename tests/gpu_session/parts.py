"""The parts of a session, in the order of their value: `python -m gpu_session.parts PART FOLDER DEADLINE CASE…`
executes one.

Each is a function from the session to its cases. A case that this machine cannot execute is a text that says why.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.pairs import LAST, Times, each_pair, under_the_lab, under_torchrun

from gpu_session.measure import Cases, Outcome, Session, against_one_device, possible
from gpu_session.report import MEASURED, OK, WRONG
from labkit.analysis.metrics import phase_seconds
from labkit.common.units import counted, milliseconds
from labkit.frontends.doctor import CHECKS
from labkit.launch.warm import client
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.prediction.devices import accelerator_of
from labkit.probe.lifetime import PARENT, end_with_parent
from labkit.probe.timeline import GAP, merged
from labkit.runs import calibration
from labkit.runs.handle import settle
from labkit.training.faults import FAULTS
from labkit.training.strategies import BASELINE, STRATEGIES
from labkit.training.workloads import WORKLOADS

SCRIPTS = Path(__file__).with_name("scripts")
TESTS = Path(__file__).resolve().parents[1]
OUT_OF_TIME = 3  # exit code of a part that has cases left


@dataclass(frozen=True)
class Part:
    """One part: what it shows, and the share of the session that it may take at most."""

    title: str
    share: float
    cases: Callable[[Session], Cases]


def machine(session: Session) -> Cases:
    """The lines of the doctor."""

    def line(check: Callable[[], Any]) -> Outcome:
        found = check()
        says = f"{found.says} ({found.fix})" if found.fix else found.says
        return Outcome(WRONG if found.level == "broken" else OK, says, {"level": found.level})

    return {check.__name__: partial(line, check) for check in CHECKS}


# ---- training


def strategies(session: Session) -> Cases:
    """Every strategy on as many GPUs as it can use, one device first."""
    cases: Cases = {}
    for name in STRATEGIES:
        spec = possible(session.machine, name)
        if isinstance(spec, Spec):
            reference = possible(session.machine, BASELINE.name, workload=spec.workload)
            cases.setdefault(_name(BASELINE.name, reference), partial(against_one_device, session, reference))
        cases.setdefault(
            _name(name, spec), spec if isinstance(spec, str) else partial(against_one_device, session, spec)
        )
    return cases


def workloads(session: Session) -> Cases:
    """The other workloads, each with the strategies that have it."""
    cases: Cases = {}
    for workload in WORKLOADS:
        for name in STRATEGIES:
            spec = possible(session.machine, name, workload=workload)
            if isinstance(spec, Spec) and _name(name, possible(session.machine, name)) != _name(name, spec):
                cases[_name(name, spec)] = partial(against_one_device, session, spec)
    return cases


def options(session: Session) -> Cases:
    """Every other value of every option of the strategies, precisions, and checkpoints."""
    cases: Cases = {}
    for name, row in STRATEGIES.items():
        for option in row.all_options:
            flipped = (not option.default,) if isinstance(option.default, bool) else ()
            values = option.choices or flipped or _VALUES.get(option.name, ())
            for value in values:
                if value != option.default and (name == "ddp" or option in row.options):
                    spec = possible(session.machine, name, options={option.name: value}, steps=8)
                    cases[f"{name}, {option.name}={value}"] = _trains(session, spec)
        for precision in ("tf32", "bf16", "fp16"):
            spec = possible(session.machine, name, precision=precision, steps=8)
            cases[f"{name}, {precision}"] = _trains(session, spec)
    for fields in ({"save_every": 5}, {"save_every": 5, "checkpoint_async": True}):
        for name in ("ddp", "fsdp2"):
            spec = possible(session.machine, name, **fields)
            case = spec if isinstance(spec, str) else partial(_resumes, session, spec)
            cases[f"{name}, {', '.join(fields)}"] = case
    return cases


_VALUES = {"accumulate": (2,), "clip_norm": (1.0,), "bucket_mb": (1,), "replicas": (2,), "micro_batches": (8,)}


def _name(strategy: str, spec: Spec | str) -> str:
    return strategy if isinstance(spec, str) else f"{strategy}, {spec.workload} × {spec.nproc}"


def _trains(session: Session, spec: Spec | str) -> str | Callable[[], Outcome]:
    def case() -> Outcome:
        trained = session.run(spec)
        wrong = [trained.failure, *trained.unwatched]
        says = "; ".join(filter(None, wrong)) or f"finished, loss {trained.handle.summary()['loss']}"
        return Outcome(WRONG if any(wrong) else OK, says, trained.figures())

    return spec if isinstance(spec, str) else case


def _resumes(session: Session, spec: Spec) -> Outcome:
    """A run with checkpoints, and one that resumes from the last of them: both end with the same loss."""
    whole = session.run(spec)
    if whole.failure:
        return Outcome(WRONG, whole.failure, whole.figures())
    resumed = session.run(settle(replace(spec, resume=str(whole.handle.folder.path))))
    if resumed.failure:
        return Outcome(WRONG, f"resumed: {resumed.failure}", resumed.figures())
    first, last = (one.handle.summary()["loss"] for one in (whole, resumed))
    same = first is not None and last is not None and abs(first - last) <= 1e-4 * abs(first)
    return Outcome(OK if same else WRONG, f"loss {first}, resumed {last}", resumed.figures())


# ---- the probe against others


def overhead(session: Session) -> Cases:
    """Pairs of a run under the lab and one under torchrun alone, and what they say together."""
    cases: Cases = {}
    for strategy, workload in (("ddp", "gpt"), ("fsdp2", "gpt"), ("ddp", "cnn")):
        spec = possible(session.machine, strategy, workload=workload, steps=LAST, samples=16 * LAST)
        name = f"{strategy}, {workload}"
        numbered = [f"{name}, pair {number}" for number in range(1, _PAIRS + 1)]
        if isinstance(spec, str):
            cases |= dict.fromkeys([*numbered, name], spec)
        else:
            cases |= dict.fromkeys(numbered, _Pairs(spec).one)
            cases[name] = partial(_together, session, numbered)
    return cases


_PAIRS = 3
_MOST_OVERHEAD = 1.03  # of the mean, profiled steps included: the target of `labkit bench`


class _Pairs:
    """The runs of one script, a pair at a time; the first one is preceded by a run that is not counted."""

    def __init__(self, spec: Spec):
        self._spec = spec
        self._pairs: Iterator[tuple[Times, ...]] | None = None

    def one(self) -> Outcome:
        if self._pairs is None:
            script = write_script(self._spec)
            lab, bare = partial(under_the_lab, device="cuda"), partial(under_torchrun, device="cuda")
            self._pairs = each_pair({"lab": (lab, script), "bare": (bare, script)}, self._spec.nproc or 1, _PAIRS)
        under, without = next(self._pairs)
        figures = {"median": under.step / without.step, "mean": under.mean / without.mean, "seconds": without.mean}
        return Outcome(MEASURED, _steps_in_words(figures), figures)


def _together(session: Session, numbered: Sequence[str]) -> Outcome:
    """The medians of the pairs that are known."""
    known = session.report.cases()
    pairs = [known["overhead", name]["figures"] for name in numbered if known["overhead", name]["verdict"] == MEASURED]
    if not pairs:
        return Outcome(WRONG, "no pair was measured")
    figures = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    holds = figures["mean"] <= _MOST_OVERHEAD
    return Outcome(OK if holds else WRONG, f"{_steps_in_words(figures)}, {counted(len(pairs), 'pair')}", figures)


def _steps_in_words(figures: Mapping[str, float]) -> str:
    ratios = f"median {figures['median']:.3f}, mean {figures['mean']:.3f}"
    return f"steps with the lab / without: {ratios}, of {milliseconds(figures['seconds'])}"


def phases(session: Session) -> Cases:
    """One script, once under the lab and once alone with measurements of its own."""
    measured: dict[str, Any] = {}

    def alone() -> Outcome:
        path = session.folder / "phases.json"
        session.python(SCRIPTS / "phases.py", path)
        found = json.loads(path.read_text(encoding="utf-8"))
        busy = [sum(end - start for start, end in merged(spans, GAP)) / 1e6 for spans in found["spans"]]
        measured.update(milliseconds=found["milliseconds"], busy=busy)
        each = ", ".join(f"{name} {value:.3g} ms" for name, value in measured["milliseconds"].items())
        return Outcome(MEASURED, f"{each}; kernels {statistics.median(measured['busy']):.3g} ms per step", measured)

    def under_lab() -> Outcome:
        if not measured:
            measured.update(session.report.cases()["phases", "alone"]["figures"])
        spec = settle(str(SCRIPTS / "phases.py"), nproc=1, device="cuda", sample_every=10)
        trained = session.run(spec)
        if trained.failure:
            return Outcome(WRONG, trained.failure, trained.figures())
        state = trained.handle.state
        pairs = {
            name: (1000 * (phase_seconds(state, 0)[name] or 0.0), alone)
            for name, alone in measured["milliseconds"].items()
        }
        timelines = state.ranks[0].timelines.values()
        if timelines:
            busy = [sum(end - start for start, end in one.busy) for one in timelines]
            pairs["kernels"] = 1000 * statistics.median(busy), statistics.median(measured["busy"])
        errors = {name: mine / own - 1 for name, (mine, own) in pairs.items() if own}
        holds = bool(timelines) and all(abs(error) <= _CLOSE_TIMES for error in errors.values())
        says = ", ".join(f"{name} {pairs[name][0]:.3g} ms ({error:+.1%})" for name, error in errors.items())
        return Outcome(OK if holds else WRONG, says, trained.figures() | {"milliseconds": pairs})

    return {"alone": alone, "under the lab": under_lab}


_CLOSE_TIMES = 0.05


# ---- starts and ends


def warm(session: Session) -> Cases:
    """A cold start, and two from one warm server."""
    found = possible(session.machine, "ddp")
    if isinstance(found, str):
        return {"cold": found, "warm": found, "warm again": found}
    spec = found
    server: list[dict[str, Any]] = []

    def cold() -> Outcome:
        trained = session.run(spec)
        summary = trained.handle.summary()
        figures = trained.figures() | {"to_first_step": summary["seconds"]["to_first_step"]}
        return Outcome(WRONG if trained.failure else OK, trained.failure or _start_in_words(summary), figures)

    def warmly() -> Outcome:
        if not server:
            server.append(_server(session))
        trained = session.run(spec, cold=False)
        summary = trained.handle.summary()
        if trained.failure or summary["start"] != "warm":
            why = trained.failure or f"started cold: {trained.handle.state.status.cold_because}"
            return Outcome(WRONG, why, trained.figures())
        reference = session.report.cases()["warm", "cold"]["figures"]["summary"]["loss"]
        same = f"loss {summary['loss']}, cold {reference}"
        equal = summary["loss"] == reference
        return Outcome(OK if equal else WRONG, f"{_start_in_words(summary)}, {same}", trained.figures())

    return {"cold": cold, "warm": warmly, "warm again": warmly}


def _start_in_words(summary: Mapping[str, Any]) -> str:
    return f"first step after {summary['seconds']['to_first_step']:.1f} s"


def _server(session: Session) -> dict[str, Any]:
    client.prepare()
    while isinstance(about := client.about(), client.Cold):
        if session.left < 0:
            raise RuntimeError(f"there is no warm server: {about.reason}")
        time.sleep(0.2)
    return about


def faults(session: Session) -> Cases:
    """Every fault that can be injected here: the run has its finding, and nothing is left on the GPUs."""
    cases: Cases = {}
    for name in sorted(FAULTS, key=lambda name: (name not in _FIRST_FAULTS, name)):
        fields = {"fault": name, "hang_after": 10, "steps": None, "epochs": 2, "samples": 160, "sample_every": 0}
        spec = possible(session.machine, "ddp", **fields)
        cases[name] = spec if isinstance(spec, str) else partial(_fault, session, spec)
    return cases


_FIRST_FAULTS = ("out_of_memory", "killed_rank", "skipped_collective", "mismatched_shape")
_LEFT_BEHIND = 64 << 20  # bytes that the driver may count differently
_GONE = 5.0  # seconds after which the memory of ended processes must be free


def _fault(session: Session, spec: Spec) -> Outcome:
    wanted, before = FAULTS[spec.fault].finding, _used(session)
    trained = session.run(spec, until=wanted)
    last = time.monotonic() + _GONE
    while (left := _used(session) - before) > _LEFT_BEHIND and time.monotonic() < last:
        time.sleep(0.2)
    figures = trained.figures() | {"findings": trained.findings, "left_behind": left}
    wrong = [] if wanted in trained.findings else [f"no finding {wanted}, but {', '.join(trained.findings) or 'none'}"]
    if left > _LEFT_BEHIND:
        wrong.append(f"{left / 2**20:.0f} MiB of GPU memory are still in use")
    title = next((one.title for one in trained.handle.findings() if one.name == wanted), "")
    return Outcome(WRONG if wrong else OK, "; ".join(wrong) or title, figures)


def _used(session: Session) -> int:
    """Bytes in use on all GPUs that are no MIG devices, by the driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in session.machine.gpus if gpu.index >= 0]
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    finally:
        pynvml.nvmlShutdown()


# ---- figures of the hardware


def bandwidth(session: Session) -> Cases:
    """What a GPU reaches, and the times of collectives between 2, 4 and all GPUs."""
    gpus = len(session.machine.gpus)
    cases: Cases = {name: partial(_device, session, name) for name in ("products", "copies", "kernels")}
    for ranks in sorted({2, 4, gpus} - {1}):
        known = f"NCCL needs a GPU for each rank, and there {'is' if gpus == 1 else 'are'} {counted(gpus, 'GPU')}"
        cases[f"NCCL × {ranks}"] = known if ranks > gpus else partial(_links, session, ranks)
    return cases


def _device(session: Session, what: str) -> Outcome:
    lines = [json.loads(line) for line in session.python(SCRIPTS / "device.py", what).splitlines()]
    found = {line["name"]: statistics.median(line["each"]) for line in lines}
    accelerator = accelerator_of(session.machine.gpus[0].name)
    says = []
    for line in lines:
        value, unit = found[line["name"]], line["unit"]
        scale, shown_as = {"s": (1e-6, "µs"), "bytes/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}[unit]
        shown = f"{value / scale:,.3g} {shown_as}"
        precision = line["name"].rpartition(", ")[2]
        peak = accelerator.flops.get(precision) if accelerator and unit == "FLOP/s" else None
        if accelerator and line["name"] == "copy in its memory":
            peak = accelerator.bandwidth
        says.append(f"{line['name']} {shown}" + (f" ({value / peak:.0%} of its peak)" if peak else ""))
    return Outcome(MEASURED, ", ".join(says), {"lines": lines})


def _links(session: Session, ranks: int) -> Outcome:
    planned = calibration.plan(ranks)
    table = calibration.calibrate(planned, seconds=max(1.0, min(calibration.SECONDS, session.left - 15)))
    path = session.folder / f"links-{ranks}.json"
    path.write_text(json.dumps(table.to_json()) + "\n", encoding="utf-8")
    says = [
        f"{name} {table.latency(name) * 1e6:.3g} µs, {table.bus_bandwidth(name) / 1e9:.3g} GB/s"
        for name in table.points
    ]
    wrong = [f"{name}: {why}" for name, why in table.missing.items()]
    if planned.backend != "nccl":
        wrong.append(f"measured over {planned.backend}")
    return Outcome(WRONG if wrong else MEASURED, "; ".join([*wrong, *says]), table.to_json())


_OF_GPUS = ("training/test_cuda.py", "probe/test_probe_clocks.py")  # with tests that are marked gpu


def tests(session: Session) -> Cases:
    """The tests of this project that need a GPU."""
    if importlib.util.find_spec("pytest") is None:
        return dict.fromkeys(_OF_GPUS, "pytest is not installed")
    return {module: partial(_tests, session, module) for module in _OF_GPUS}


def _tests(session: Session, module: str) -> Outcome:
    path = session.folder / "tests.xml"
    path.unlink(missing_ok=True)
    command = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junit-xml={path}", TESTS / module)
    session.python(*command, failing=(1,))
    cases = list(xml.parse(path).getroot().iter("testcase"))
    tags = {case.get("name", ""): {one.tag for one in case} for case in cases}
    failed = [name for name, found in tags.items() if found & {"failure", "error"}]
    skipped = sum("skipped" in found for found in tags.values())
    says = f"{len(tags) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"
    figures = {"tests": {name: sorted(found) for name, found in tags.items()}}
    return Outcome(WRONG if failed else OK, f"{says}: {', '.join(failed)}" if failed else says, figures)


PARTS: dict[str, Part] = {
    "machine": Part("What the doctor says", 0.06, machine),
    "strategies": Part(
        "Losses, memory and steps of every strategy, against one device and the prediction", 0.36, strategies
    ),
    "overhead": Part("Steps under the lab and without it, in pairs", 0.12, overhead),
    "phases": Part("Phases and kernels, against the script's own events and profiler", 0.08, phases),
    "warm": Part("Warm starts", 0.08, warm),
    "faults": Part("Injected faults and their findings", 0.18, faults),
    "bandwidth": Part("What the GPUs and their links reach", 0.1, bandwidth),
    "tests": Part("The project's tests of GPUs", 0.16, tests),
    "workloads": Part("The strategies on the other workloads", 0.3, workloads),
    "options": Part("Every option, precisions and checkpoints", 1.0, options),
}


def main(name: str, folder: str, deadline: str, *chosen: str) -> int:
    """Executes one part, or those of its cases whose names begin with one of `chosen`; returns 0 if every case is
    known, otherwise `OUT_OF_TIME`."""
    session = Session(Path(folder), name, float(deadline))
    return 0 if session.execute(PARTS[name].cases(session), chosen) else OUT_OF_TIME


if __name__ == "__main__":
    end_with_parent(os.environ[PARENT])
    sys.exit(main(*sys.argv[1:]))
