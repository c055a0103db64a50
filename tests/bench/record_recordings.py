"""Records the runs that come with the lab, in `labs/recordings/`: `python -m tests.bench.record_recordings [NAME…]`.

Each strategy runs on 2 CPU ranks and on 4 (the baseline on one), with profiled steps and a prediction; what names this
machine, its user or its folders is left out. Nothing else should run meanwhile: the times are shown to learners.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit.common.files import write_atomically
from labkit.jobs import zipped
from labkit.plan.spec import Spec, SpecError
from labkit.prediction.predict import predict
from labkit.prediction.tracer import TraceFailed
from labkit.record.packed import SHIPPED, recording
from labkit.runs.handle import run, settle
from labkit.training.strategies import BASELINE, STRATEGIES
from labkit.training.workloads import WORKLOADS

RANKS = (1, 2, 4)
STEPS, SAMPLE_EVERY = 30, 10
HOST = "lab"
MOST = 1 << 20  # bytes of a recording
_PATH = re.compile(r"(?:/[\w.+@-]+){2,}/?")


def main(names: list[str]) -> int:
    """Records the runs whose name, such as ddp-x2, is among `names`, or all of them."""
    SHIPPED.mkdir(exist_ok=True)
    for strategy in STRATEGIES:
        for ranks in RANKS[:1] if strategy == BASELINE.name else RANKS[1:]:
            name = f"{strategy}-x{ranks}"
            if not names or name in names:
                print(f"{name}: {recorded(strategy, ranks)}", flush=True)
    return 0


def recorded(strategy: str, ranks: int) -> str:
    """Records one run; what became of it, in words."""
    try:
        spec = first_possible(strategy, nproc=ranks, device="cpu", steps=STEPS, sample_every=SAMPLE_EVERY)
        predict(spec)
    except (SpecError, TraceFailed) as error:
        return f"left out: {error}"
    with tempfile.TemporaryDirectory() as place:
        os.environ["LABKIT_RUNS"] = place
        job = run(spec).wait()
        if job.state.status.state != "finished":
            return f"left out: {job.words}"
        files = {name: without_machine(name, data) for name, data in recording(job.folder).items()}
        data = zipped(files)
    if len(data) > MOST:
        return f"left out: {len(data):,} bytes"
    write_atomically(SHIPPED / f"{spec.name}.zip", data)
    return f"{len(data):,} bytes"


def first_possible(strategy: str, **fields: Any) -> Spec:
    """The Spec of a strategy with the first workload that it can train; `SpecError` if there is none."""
    refused: SpecError | None = None
    for workload in WORKLOADS:
        try:
            return settle(strategy, workload=workload, **fields)
        except SpecError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def without_machine(name: str, data: bytes) -> bytes:
    """A file of a recording without the names of this machine, its user and its folders."""
    if name.endswith(".jsonl"):
        lines = [json.dumps(scrubbed(json.loads(line)), separators=(",", ":")) for line in data.decode().splitlines()]
        return "".join(f"{line}\n" for line in lines).encode()
    if name.endswith(".json"):
        return json.dumps(scrubbed(json.loads(data)), indent=2).encode()
    return data if name.endswith((".steps", ".py")) else scrubbed(data.decode(errors="replace")).encode()


def scrubbed(value: Any, key: str = "") -> Any:
    """A value with the last part of each path only, and without the names of the host and of its boot."""
    if isinstance(value, dict):
        return {name: scrubbed(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    if key in ("host", "boot"):
        return HOST
    return _PATH.sub(lambda path: Path(path[0]).name, value).replace(socket.gethostname(), HOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
