"""The status of a TrainJob: what a real run sends to a status server, and that no server slows or fails a run."""

from __future__ import annotations

import math
import os
import shutil
import threading

import pytest
from conftest import wait_until
from fabricate import FakeRun
from status_server import status_server

from labkit import Run, run
from labkit.exports.trainjob import Reports, Server, status_of

SMALL = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "samples": 320, "sample_every": 0}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl for a certificate")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A status server, and this process as if in a pod of its TrainJob."""
    (tmp_path / "secrets").mkdir()
    with status_server(tmp_path / "secrets") as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server


def values(status: dict) -> dict[str, float]:
    return {metric["name"]: float(metric["value"]) for metric in status["metrics"]}


def test_a_run_reports_its_progress(server):
    done = run("ddp", epochs=2, **SMALL).wait()
    assert done.state.words == "finished" and not server.refused
    last = server.got[-1][1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    found = values(last)
    assert (found["steps"], found["total_steps"]) == (20, 20)
    assert math.isclose(found["loss"], done.state.loss_at(), rel_tol=1e-6)
    assert found["samples_per_second"] > 0 and "logged/accuracy" in found
    assert "not_reported" not in {finding.name for finding in done.findings()}


def test_a_server_that_refuses_is_one_finding(server):
    server.token = "another"
    done = run("ddp", epochs=1, **SMALL).wait()
    assert done.state.words == "finished" and set(server.refused) == {403} and not server.got
    (finding,) = [finding for finding in done.findings() if finding.name == "not_reported"]
    assert "HTTP 403 Forbidden" in finding.evidence
    summary = done.summary()  # as written at the end
    assert "not_reported" in {found["name"] for found in summary["findings"]}


def test_progress_of_a_run_that_is_under_way(runs, server):
    fake = FakeRun(runs, steps=200)
    fake.start()
    fake.step(50)
    state = Run.attach(fake.folder.path).state
    status = status_of(state)
    assert status["progressPercentage"] == 25
    assert status["estimatedRemainingSeconds"] == math.ceil(150 * fake.step_seconds)
    fake.writers[0].write("metric", name="x" * 300, value=1.0, step=50)
    fake.writers[0].write("metric", name="a text", value="no number", step=50)
    state = Run.attach(fake.folder.path).state
    said: list[str] = []
    reports = Reports(Server.of(_variables()), said.append)
    for _ in range(100):
        reports.offer(state)  # far more often than once in five seconds
    wait_until(lambda: server.got)
    reports.end(state, finished=False)
    fake.close()
    assert len(server.got) == 2 and not server.refused and not said
    assert server.got[-1][1]["progressPercentage"] == 25
    assert sum(name.startswith("logged/") for name in values(server.got[-1][1])) == 1


def _variables() -> dict[str, str]:
    """Those of the first proposal, which have other names."""
    names = ("URL", "TOKEN", "CA_CERT")
    return {f"KUBEFLOW_TRAINER_STATUS_{name}": os.environ[f"KUBEFLOW_TRAINER_SERVER_{name}"] for name in names}


def test_a_token_that_was_replaced_is_read_again(runs, server, tmp_path):
    found = Server.of(_variables())
    fake = FakeRun(runs)
    fake.start()
    fake.step(3)
    status = status_of(Run.attach(fake.folder.path).state)
    fake.close()
    found.send(status, 5)
    server.token = "new"
    (tmp_path / "secrets" / "token").write_text("new")
    found.send(status, 5)
    assert len(server.got) == 2


def test_a_server_that_does_not_answer_delays_nothing(runs, server):
    server.hang = threading.Event()
    fake = FakeRun(runs)
    fake.start()
    fake.step(3)
    state = Run.attach(fake.folder.path).state
    fake.close()
    said: list[str] = []
    reports = Reports(Server.of(_variables()), said.append)
    reports.offer(state)  # returns although nobody answers
    reports.end(state, finished=True)
    wait_until(lambda: said)
    assert "timed out" in said[0]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("URL", "file:///etc/passwd", "it must begin with https://"),
        ("URL", "https://localhost:1/", "Connection refused"),
        ("TOKEN", "/nowhere/token", "/nowhere/token cannot be read: No such file"),
        ("CA_CERT", "", "certificate is not accepted"),
    ],
)
def test_what_is_wrong_is_said_once(runs, server, name, value, says):
    fake = FakeRun(runs)
    fake.start()
    fake.step(3)
    state = Run.attach(fake.folder.path).state
    fake.close()
    said: list[str] = []
    reports = Reports(Server.of(_variables() | {f"KUBEFLOW_TRAINER_STATUS_{name}": value}), said.append)
    reports.end(state, finished=True)
    reports.end(state, finished=True)
    wait_until(lambda: said)
    assert len(said) == 1 and says in said[0]
