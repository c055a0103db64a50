"""The bytes that two ranks exchange in a step, against what the way of splitting demands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.probe.traffic import operation, sent
from labkit.record.events import Reader
from labkit.record.state import RunState

SCRIPT = Path(__file__).parent / "scripts" / "exchange.py"
ALL = 4 * (16 * 34 + 34 + 34 * 5 + 5)  # bytes of the model's parameters
PADDED = ALL + 4 * (34 + 1)  # FSDP2 gives both ranks as many rows: of five, three each
RECORDER = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")


def exchange(way: str, run: Path, **more: str) -> Path:
    """Runs the script under the probe, on two ranks where `way` splits anything; gives the run's folder."""
    alone = [sys.executable]
    start = alone if way == "single" else [*alone, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    environment = inherited | {"LABKIT_RUN_DIR": str(run), "OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        [*start, "-m", "labkit.probe", str(SCRIPT), way],
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return run


def ranks(run: Path) -> dict:
    state = RunState()
    for file in sorted((run / "events").glob("rank*.jsonl")):
        for event in Reader(file).poll():
            assert event["kind"] != "probe_error", event
            state.apply(event)
    return state.ranks


@pytest.mark.skipif(not RECORDER, reason="this torch has no flight recorder")
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("ddp", [{"all_reduce": ALL}] * 2),
        ("fsdp2", [{"all_gather": PADDED, "all_reduce": PADDED}] * 2),  # gloo's reduce-scatter is an all-reduce
        ("pp", [{"send": 8 * 34 * 4}] * 2),
    ],
)
def test_bytes_of_a_step(way, expected, tmp_path):
    found = ranks(exchange(way, tmp_path))
    for rank, ops in enumerate(expected):
        traffic = found[rank].traffic
        assert {name: op["bytes"] for name, op in traffic["ops"].items()} == ops
        assert found[rank].bytes_per_step == sum(sent(name, size, 2) for name, size in ops.items())


def test_one_process_sends_nothing(tmp_path):
    assert ranks(exchange("single", tmp_path))[0].bytes_per_step == 0.0


def test_a_ring():
    assert (sent("all_reduce", 100, 4), sent("all_gather", 100, 4), sent("send", 100, 4), sent("barrier", 100, 4)) == (150, 75, 100, 0)


def test_names_of_backends():
    names = ["nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:all_reduce_barrier", "gloo:all_reduce"]
    assert [operation(name) for name in names] == ["all_gather", "reduce_scatter", "barrier", "all_reduce"]
