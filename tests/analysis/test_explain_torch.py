"""What the installed torch writes is read: a trace of its profiler, and both kinds of flight-recorder dumps."""

from __future__ import annotations

import os
import subprocess
import sys

import labkit

SCRIPT = """
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as private
from torch.profiler import ProfilerActivity, profile, schedule
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=True,
    schedule=schedule(wait=0, warmup=1, active=3),
    on_trace_ready=lambda profiler: profiler.export_chrome_trace("trace.json"),
) as profiler:
    for _ in range(4):
        dist.all_reduce(torch.ones(64, 64) @ torch.ones(64, 64))
        profiler.step()
open("dump_0", "wb").write(private._dump_fr_trace())
open("dump_0.json", "wb").write(private._dump_fr_trace_json())
"""


def test_files_of_the_installed_torch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"TORCH_FR_BUFFER_SIZE": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (profile,) = labkit.explain(tmp_path / "trace.json").pages
    assert profile.title == "1 profile of torch.profiler · rank 0 of 1 · CPU · gloo · steps 1 to 2"
    assert "aten::mm" in [kernel["name"] for kernel in profile.figures["kernels"]]
    (row,) = profile.figures["collectives"]
    assert (row["operation"], row["count"], row["bytes"]) == ("all_reduce", 2, 2 * 64 * 64 * 4)
    for name, line in (("dump_0", "train.py:13"), ("dump_0.json", "–")):
        (dump,) = labkit.explain(tmp_path / name).pages
        assert dump.figures["ranks"][0]["entries"] == 4
        assert dump.tables[1].rows == (("0", "all_reduce #4", "group 0", "completed", line),)
        assert not dump.findings
