"""The process that traces, and which ranks do the same work so that only one of them needs a trace."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from labkit.analysis.theory.formulas import States, states
from labkit.common.text import visible_line
from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.training.strategies import BASELINE

# ---- ranks that do the same work

MOST = 16  # classes that are traced


def classes(spec: Spec) -> list[list[int]]:
    """The ranks of a Spec with a known number of ranks, grouped by pipeline stage and by the bytes that they store.

    Shards of unequal size are separate classes. With more than `MOST` classes, those of a stage that store the
    least join the one that stores the most, whose memory is then an upper bound. The first rank of a class represents
    it. Which ranks of a script of the user's own are alike is not known: each is a class, or with more than `MOST`
    stands for those up to the next one.
    """
    if spec.strategy is None:
        return _evenly(spec.processes)
    stages = spec.strategy_row.constants(spec).get("STAGES", ())
    pipes = spec.options.get("pp_size", spec.processes) if stages else 1
    held = states(spec) or (None,) * spec.processes
    found: list[list[int]] = []
    for stage in range(pipes):
        each = spec.processes // pipes
        alike: dict[States | None, list[int]] = {}
        for rank in range(stage * each, (stage + 1) * each):
            alike.setdefault(held[rank], []).append(rank)
        sizes = {ranks[0]: (own.total if own else 0) for own, ranks in alike.items()}
        largest, *others = sorted(alike.values(), key=lambda ranks: -sizes[ranks[0]])
        traced = max(0, MOST // pipes - 1)
        found += [largest + [rank for ranks in others[traced:] for rank in ranks], *others[:traced]]
    return found


def joined(groups: Sequence[list[int]], traces: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Classes whose traces turned out to be equal become one."""
    found: list[list[int]] = []
    for ranks in groups:
        same = next((ranks_of_class for ranks_of_class in found if traces[ranks_of_class[0]] == traces[ranks[0]]), None)
        if same is None:
            found.append([*ranks])
        else:
            same += ranks
    return found


def _evenly(ranks: int) -> list[list[int]]:
    """Rank 0, the last one, and others between them, each with those up to the next one."""
    count = min(ranks, MOST)
    firsts = [number * (ranks - 1) // (count - 1) for number in range(count)] if count > 1 else [0]
    return [[*range(first, end)] for first, end in zip(firsts, [*firsts[1:], ranks])]


# ---- the process that traces

PATIENCE = 300.0  # seconds for a request
MEASURED = 2.0  # seconds for which the computation of a step is measured
_LIMIT = 120  # seconds for the first steps of a script of the user's own
# The first typical step by wrapper: optimizer state exists from the second one on; in the third, DDP has its final
# buckets and PowerSGD compresses.
_FIRST_TYPICAL, _THIRD = {"FSDP": 2}, 3
_OTHER = 3  # what a script reads from integers without data in a second trace
_MESSAGE = 300  # characters of an error
_BLOCK = 1 << 20  # bytes
_POLL = 0.05  # seconds between two looks at whether a request is cancelled
_CANCEL = b"null\n"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ALONE = {**dict.fromkeys(_THREADS, "1"), "CUDA_VISIBLE_DEVICES": ""}


class TraceFailed(RuntimeError):
    """A trace ended without a result: one sentence that names the error and the line of the script."""


class Cancelled(Exception):
    """A request was cancelled."""


def never() -> bool:
    """Of a request that is not cancelled."""
    return False


def traced(spec: Spec, ranks: Iterable[int], cancelled: Callable[[], bool] = never) -> dict[int, dict[str, Any]]:
    """The traces of some ranks of a Spec with a known number of ranks, by rank. Raises `TraceFailed`, and `Cancelled`
    soon after `cancelled` returns true."""
    if spec.strategy is None:
        return _own_traces(ranks, spec, cancelled)
    return _results("trace", ranks, spec, {**_generated(spec), "model": _on_one_device(spec)}, cancelled)


def _own_traces(ranks: Iterable[int], spec: Spec, cancelled: Callable[[], bool]) -> dict[int, dict[str, Any]]:
    """The traces of a script of the user's own. If it reads integers that a trace does not have, a rank is traced again
    with other ones; `TraceFailed` if its step is another one then. If it decides by other numbers, a rank is traced
    again with the contrary decisions, and `ended` says so if its step is another one then.
    """
    found = _results("script's trace", ranks, spec, _own(spec), cancelled)
    read = {rank: line for rank, trace in found.items() if (line := trace.pop("number_read"))}
    decided = {rank: line for rank, trace in found.items() if (line := trace.pop("decided"))}

    def depends(rank: int, other: Mapping[str, Any]) -> bool:
        try:
            trace = _results("script's trace", [rank], spec, {**_own(spec), **other}, cancelled)[rank]
        except TraceFailed:
            return True
        return bool(trace["step"]["peak"] != found[rank]["step"]["peak"] or trace["calls"] != found[rank]["calls"])

    for rank, line in [*read.items()][:1]:
        if depends(rank, {"number": _OTHER}):
            raise TraceFailed(
                f"rank {rank}: {line} reads a number that depends on the data, which a trace does not have, and the"
                " step depends on it; compute sizes from shapes"
            )
    for rank, line in [*decided.items()][:1]:
        if not found[rank]["ended"] and depends(rank, {"contrary": True}):
            found[rank]["ended"] = f"{line} decides by a number that depends on the data; the prediction has 1 for it"
    return found


def computed(spec: Spec, ranks: Iterable[int], cancelled: Callable[[], bool] = never) -> dict[int, list[list[Any]]]:
    """The programs of some ranks of a strategy's script, as `tracing.rank` measures them. Ranks may be repeated: it
    measures as many at a time as there are cores. Raises as `traced` does."""
    one_thread = spec.processes == spec.nproc and not spec.options["workers"]
    script = {**_generated(spec), "source": write_script(spec), "seconds": MEASURED, "one_thread": one_thread}
    return _results("measurement", ranks, spec, script, cancelled)


def _results(
    work: str, ranks: Iterable[int], spec: Spec, script: Mapping[str, Any], cancelled: Callable[[], bool]
) -> dict[int, Any]:
    request = {"work": work, "of": [*ranks], "ranks": spec.processes, **script}
    found, failed = {}, ""
    for result in TRACER.answers(request, cancelled):
        if "reason" in result:
            failed = failed or f"rank {result['rank']}: {_short(result['reason'])}"
        elif "error" in result:
            where = f" ({result['where']})" if result["where"] else ""
            ended = f"of rank {result['rank']} ended with {_short(result['error'])}{where}"
            failed = failed or f"the {work} {ended}"
        else:
            found[result["rank"]] = result["result"]
    if failed:
        raise TraceFailed(failed)
    return found


def _generated(spec: Spec) -> dict[str, Any]:
    return {
        "source": write_script(spec, in_place=False),
        "path": "train.py",
        "grouped": spec.strategy_row.process_group,
        "sample": spec.data_row.input_shape(spec.options),
        "split": _split_outputs(spec),
        "gpus": spec.device == "cuda",
        "steps": _FIRST_TYPICAL.get(spec.strategy_row.wrapper, _THIRD),
    }


def _on_one_device(spec: Spec) -> str:
    """The source of a script that trains the same model on one device, without further options."""
    options = {option.name: spec.options[option.name] for option in spec.workload_row.options}
    return write_script(Spec(BASELINE.name, spec.workload, nproc=1, device="cpu", data=spec.data, options=options))


def _own(spec: Spec) -> dict[str, Any]:
    """The user's script, as torchrun would start it here and now."""
    return {
        "arguments": [*(["-m"] if spec.as_module else []), spec.script, *spec.args],
        "folder": str(Path.cwd()),
        "environment": _environment(os.environ),
        "gpus": spec.device == "cuda",
        "limit": _LIMIT,
        "number": 1,
        "contrary": False,
    }


def _split_outputs(spec: Spec) -> list[tuple[int, int] | None]:
    """For each block, the dimension of its output that tensor-parallel ranks split, and their number; None for a whole
    output."""
    ranks = spec.strategy_row.one_loss(spec)
    dimension = 1 if spec.options.get("sequence_parallel") else -1
    outputs = spec.workload_row.outputs(spec.options)
    return [(dimension, ranks) if is_part and ranks > 1 else None for _, is_part in outputs]


class Process(Protocol):
    """What a tracer needs of the process that traces, as `subprocess.Popen` has it. `wait` returns the exit code, None
    if it is unknown."""

    pid: int
    stdin: Any
    stdout: Any

    def poll(self) -> int | None: ...
    def wait(self) -> int | None: ...
    def kill(self) -> None: ...


class Tracer:
    """Starts the process when it is needed, and asks it one request at a time.

    `forked` may give it a process that has imported torch already, with more variables of its environment and a
    descriptor for its standard error.
    """

    def __init__(self) -> None:
        self.forked: Callable[[Mapping[str, str], int], Process | None] = lambda environment, errors: None
        self._lock = threading.Lock()
        self._process: Process | None = None

    def answers(self, request: Mapping[str, Any], cancelled: Callable[[], bool] = never) -> list[dict[str, Any]]:
        """The results of a request, one per rank. Raises as `traced` does; the process is then ready for another
        request."""
        with self._lock:
            if cancelled():
                raise Cancelled
            process = self._running()
            assert process.stdin
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                return [*self._results(process, cancelled)]
            except BrokenPipeError:
                self._failed(process)
            except Cancelled:
                raise
            except BaseException:
                self.end()  # a half-read answer must not be taken for the next one's
                raise

    def prepare(self) -> None:
        """Starts the process, which takes seconds, without waiting for it."""
        with self._lock:
            self._running()

    def end(self) -> None:
        """Kills the process, and with it its children."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> Process:
        if self._process is None or self._process.poll() is not None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 as long as the process
            self._process = self.forked(_ALONE, self._errors.fileno()) or subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.tracing"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(os.environ),
                start_new_session=True,  # Ctrl-C is handled here
            )
        return self._process

    def _results(self, process: Process, cancelled: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        assert process.stdin and process.stdout
        last, rest, is_ending = time.monotonic() + PATIENCE, b"", False
        while True:
            if not is_ending and cancelled():
                is_ending = True
                process.stdin.write(_CANCEL)
                process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _POLL)
            if not ready:
                if time.monotonic() > last:
                    raise TraceFailed(f"the trace took longer than {PATIENCE:.0f} seconds; use a smaller model")
                continue
            block = os.read(process.stdout.fileno(), _BLOCK)
            if not block:
                self._failed(process)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                result = json.loads(line)
                if result is None and is_ending:
                    raise Cancelled
                if result is None:
                    return
                yield result

    def _failed(self, process: Process) -> NoReturn:
        code = process.wait()
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        how = "ended" if code is None else f"ended with exit code {code}"
        if code and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        raise TraceFailed(f"the process that traces {how}" + (f": {_short(said[-1])}" if said else ""))


TRACER = Tracer()


def _short(text: str) -> str:
    return visible_line(text.strip().partition("\n")[0])[:_MESSAGE]


def _environment(standing: Mapping[str, str]) -> dict[str, str]:
    """One thread per rank, as torchrun sets it; no GPU, which the trace must not touch."""
    return {**standing, **_ALONE}
