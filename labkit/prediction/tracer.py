"""Starts the process that traces, and reads what it reports. Whatever happens to that process, the caller survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from labkit.common.text import visible_line
from labkit.plan.script import write_script
from labkit.plan.spec import Spec

PATIENCE = 300.0  # seconds
_MESSAGE = 300  # characters of an error
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class TraceFailed(RuntimeError):
    """A trace ended without a result: one sentence that names the operation, and the line of the script."""


def traced(spec: Spec, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """The traces of some ranks of a Spec with a known number of ranks, by rank. Raises `TraceFailed`."""
    request = {
        "source": write_script(spec),
        "path": "train.py",
        "ranks": spec.processes,
        "traced": [*ranks],
        "sample": spec.data_row.input_shape(spec.options),
    }
    found = {}
    for line in _lines(json.dumps(request)):
        if "error" in line:
            where = f" in {line['where']}" if line["where"] else ""
            raise TraceFailed(f"the trace of rank {line['rank']} ended with {_short(line['error'])}{where}")
        found[line["rank"]] = line["trace"]
    return found


def _lines(request: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", f"{__package__}.tracing"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(os.environ),
        start_new_session=True,  # Ctrl-C is handled here
    )
    try:
        out, errors = process.communicate(request, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise TraceFailed(f"the trace took longer than {PATIENCE:.0f} seconds; use a smaller model") from None
    finally:
        if process.poll() is None:
            process.kill()  # its children end with it
        process.wait()
    if process.returncode:
        raise TraceFailed(_died(process.returncode, errors))
    return (json.loads(line) for line in out.splitlines())


def _died(code: int, errors: str) -> str:
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process that traces {how}" + (f": {_short(last)}" if last else "")


def _short(text: str) -> str:
    return visible_line(text.strip().partition("\n")[0])[:_MESSAGE]


def _environment(standing: Mapping[str, str]) -> dict[str, str]:
    """One thread per rank, as torchrun sets it; no GPU, which the trace must not touch."""
    return {**standing, **dict.fromkeys(_THREADS, "1"), "CUDA_VISIBLE_DEVICES": ""}
