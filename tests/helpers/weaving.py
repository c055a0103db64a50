"""What the tests of scripts share: runs of scripts outside of the lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from conftest import warm_run
from places import HELPERS, SCRIPTS

from labkit.plan.script import write_script
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run

RECORDER = HELPERS / "recorder.py"
EXCHANGE = SCRIPTS / "exchange.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir=torchrun")


def run_alone(argv: list[str], folder: Path, seconds: float = 600, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command in `folder`, where no labkit can be imported, one thread per process; returns its whole stdout, or
    fails the test. `environment` is added to that of this process."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=settings
        | dict(environment or {})
        | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert_trained(done)
    return done.stdout


def assert_trained(done: subprocess.CompletedProcess[str]) -> None:
    """A bare script ended without an error; or no rank raised one, and a thread of gloo aborted it while Python shut
    down (labkit/training/strategies/README.md)."""
    aborted = "terminate called without an active exception" in done.stderr and "]: Traceback" not in done.stderr
    assert done.returncode == 0 or aborted, done.stderr[-3000:]


def record(spec: Spec, folder: Path, alone: bool = False) -> list[dict]:
    """What each rank's steps and evaluations gave: `losses` and `evaluations`, by rank.

    The ranks are those of a run, forked from the warm server; or the script runs `alone`, by torchrun, without labkit.
    """
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(write_script(spec), encoding="utf-8")
    if alone:
        launcher = [sys.executable] if spec.processes == 1 else [*TORCHRUN, f"--nproc-per-node={spec.processes}"]
        run_alone([*launcher, str(RECORDER), "train.py", "."], folder)
    else:
        asked = {"nproc": spec.processes, "device": spec.device, "args": [str(script), str(folder)], "sample_every": 0}
        handle = warm_run(RECORDER, **asked)
        assert handle.state.status.state == "finished", handle.logs(0, "stderr")[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(spec.processes)]


def exchange(shared_run: Callable[..., Run], way: str, tensors: bool = True) -> RunFolder:
    """The folder of a run of scripts/exchange.py, on two ranks where `way` splits anything."""
    handle = shared_run(EXCHANGE, nproc=1 if way == "single" else 2, device="cpu", args=[way], tensors=tensors)
    assert handle.words == "finished", handle.logs(0, "stderr")
    return handle.folder
