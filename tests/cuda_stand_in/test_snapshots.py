"""What is said about snapshots of torch's own allocator: its peaks, and what it reports when memory runs out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.analysis.foreign import opening

HEAD = """
import json, sys, torch
from torch import nn
torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="all")
"""
TRAINING = """
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for step in range(12):
    x = torch.randn(512, 256).to("cuda")
    target = torch.zeros(512, dtype=torch.long).to("cuda")
    loss = nn.functional.cross_entropy(model(x), target)
    losses.append(loss if KEEPS else loss.detach())
    loss.backward(retain_graph=KEEPS)
    optimizer.step()
    optimizer.zero_grad()
"""
STREAMS = """
other = torch.cuda.Stream()
for step in range(10):
    x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(other):
        y = torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
    x.record_stream(other)
    del x
"""
HOLES = """
whole = torch.empty(13 << 30, dtype=torch.uint8, device="cuda")
del whole
pieces = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(208)]
del pieces[::2]
try:
    torch.empty(3000 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
"""
TAIL = """
torch.cuda.memory._dump_snapshot(sys.argv[1])
print(json.dumps(dict(torch.cuda.memory_stats())))
"""


def taken(folder: Path, body: str) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The page about the snapshot of a script, the figures of its device, and torch's own statistics."""
    script, snapshot = folder / "train.py", folder / "snapshot.pickle"
    script.write_text(HEAD + body + TAIL, encoding="utf-8")
    done = subprocess.run([sys.executable, script, snapshot], capture_output=True, text=True, check=True)
    (found,) = opening.explain([snapshot])
    return found, found.figures["devices"][0], json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "body",
    [TRAINING.replace("KEEPS", "True"), TRAINING.replace("KEEPS", "False"), STREAMS, HOLES],
    ids=["leak", "training", "streams", "holes"],
)
def test_peaks_and_totals_are_those_of_torch(body, tmp_path):
    _, figures, statistics = taken(tmp_path, body)
    assert figures["history"]["unmatched"] == 0
    assert figures["peak"] == statistics["requested_bytes.all.peak"]
    assert figures["end"] == statistics["requested_bytes.all.current"]
    assert figures["reserved"] == statistics["reserved_bytes.all.peak"]
    assert sum(pool["allocated"] for pool in figures["pools"]) == statistics["allocated_bytes.all.current"]


def test_only_losses_with_their_graph_grow(tmp_path):
    kept, _, _ = taken(tmp_path, TRAINING.replace("KEEPS", "True"))
    assert [finding.name for finding in kept.findings] == ["memory_growth"]
    assert "(train.py:12)" in kept.findings[0].title
    detached, _, _ = taken(tmp_path, TRAINING.replace("KEEPS", "False"))
    assert detached.findings == []


def test_fragmentation_is_what_torch_reports(tmp_path, on_machine):
    on_machine("t4x1")
    found, figures, _ = taken(tmp_path, HOLES)
    assert [finding.name for finding in found.findings] == ["out_of_memory_fragmented"]
    (oom,) = figures["ooms"]
    assert (oom["requested"], oom["active"], oom["line"]) == (3000 << 20, 104 * 64 << 20, "train.py:11")
    assert oom["free"] == {"bytes": 104 * 64 << 20, "largest": 64 << 20, "blocked": 104 * 64 << 20}
