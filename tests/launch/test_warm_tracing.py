"""The process that traces, forked from the warm server."""

from __future__ import annotations

import psutil
import pytest

from labkit.launch.warm import client
from labkit.plan.spec import Spec
from labkit.prediction import tracer


def test_a_process_that_traces_is_forked_and_ends_with_its_input(server, monkeypatch, patient):
    fresh = tracer.Tracer()
    fresh.forked = client.tracing
    monkeypatch.setattr(tracer, "TRACER", fresh)
    spec = Spec("single", workload="mlp", nproc=1, batch_size=4, device="cpu", precision="fp32")
    assert tracer.traced(spec, [0])[0]["step"]["peak"] > 0
    process = psutil.Process(fresh._process.pid)
    assert process.ppid() == server["pid"] and "labkit.prediction.tracing" in process.cmdline()
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
    fresh._process.stdin.close()
    process.wait(60)
    assert tracer.traced(spec, [0]) and fresh._process.pid != process.pid, "another one was forked"
    fresh._process.kill()
    with pytest.raises(tracer.TraceFailed, match="the process that traces ended"):
        fresh._failed(fresh._process)
    assert client.about()["runs"] == server["runs"]


def test_without_a_server_that_can_nothing_is_forked_for_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert client.tracing({}, 2) is None
    monkeypatch.setenv(client.FORCE_COLD, "1")
    assert client.tracing({}, 2) is None
