"""Dumps of torch's flight recorder, in the layout of version 2.10."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORLD = ("0", "default_pg")


def call(number: int, op: str = "all_reduce", state: str = "completed", **changes: Any) -> dict[str, Any]:
    """An entry; `sizes`, `dtype` and `line` are short for several of its fields."""
    sizes, dtype, line = (
        changes.pop(name, other) for name, other in (("sizes", [[8]]), ("dtype", "Float"), ("line", 88))
    )
    return {
        "frames": [
            {
                "name": op,
                "filename": "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
                "line": 9,
            },
            {"name": "train", "filename": "/home/user/train.py", "line": line},
        ],
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": WORLD,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_795_772_571_000_000_000 + 1_000_000 * number,
        "input_sizes": sizes,
        "input_dtypes": [dtype],
        "output_sizes": changes.pop("outputs", sizes),
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | changes


def dump(entries: Sequence[Any], groups: Mapping[tuple[str, str], Sequence[int]]) -> dict[str, Any]:
    """The dump of a rank that is a member of these groups."""
    config = {name: {"name": name, "desc": about, "ranks": str([*ranks])} for (name, about), ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": [*entries]}


def write(folder: Path, dumps: Mapping[int, Any]) -> Path:
    """One pickle per rank, as torch names and writes them."""
    folder.mkdir(exist_ok=True)
    for rank, content in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder
