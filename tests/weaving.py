"""What the tests of scripts share: runs of scripts outside of the lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from labkit.runs.handle import run

from labkit.plan.script import write_script
from labkit.plan.spec import Spec

RECORDER = Path(__file__).with_name("recorder.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def run_alone(argv: list[str], folder: Path, seconds: float = 600) -> str:
    """Runs a command in `folder`, where no labkit can be imported, one thread a process; its stdout, or the failure of the test.

    Torch may abort a rank on its way out, after all went well (see labkit/training/strategies/README.md): that is no failure, and stdout
    is whole.
    """
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=settings | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr[-3000:]
    return done.stdout


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
        handle = run(RECORDER, **asked).wait(600)
        assert handle.state.status["state"] == "finished", handle.logs(0, "stderr")[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(spec.processes)]
