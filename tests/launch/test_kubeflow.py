"""Runs on Kubeflow Trainer: submitted through its real SDK to an API server on this machine, followed, and deleted."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import psutil
import pytest
from commands import called
from conftest import wait_until
from trainer_api import cluster

from labkit.launch import kubeflow_agent
from labkit.launch.job import LaunchError
from labkit.record.documents import TrainJob
from labkit.runs.gathering import submit
from labkit.runs.handle import Run
from labkit.setup.environment import has

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "trainjob.json").read_text())
SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "device": "cpu"}
sdk = pytest.mark.skipif(not has("kubeflow"), reason="the package of the extra kubeflow is not installed")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A cluster, and this process as if its user had a kubeconfig for it."""
    place = tmp_path / "cluster"
    place.mkdir()
    with cluster(place) as server:
        monkeypatch.setenv("KUBECONFIG", str(place / "config"))
        monkeypatch.chdir(tmp_path)
        yield server


def submitted(what: str, **fields) -> Run:
    run = submit(what, engine="kubeflow", device="cpu", **fields)
    assert isinstance(run, Run)
    return run


@sdk
def test_a_run_on_two_nodes(server):
    server.breaks = 4  # connections to a log that end early
    run = submitted("ddp", nproc=2, nodes=2, steps=4, workload="mlp", samples=512, batch_size=32)
    run.wait(240)
    logs = run.folder.text(run.folder.pods_log)
    assert run.state.words == "finished", logs
    assert "step 4: loss" in run.logs(0)
    assert sum("step 4: loss" in line for line in logs.splitlines()) == 1
    assert {line.split("/")[1] for line in logs.splitlines()} == set(server.pods)
    queue = run.state.queue
    assert (queue.scheduler, queue.state, queue.job) == ("Kubeflow", "Complete", server.created[0]["metadata"]["name"])
    assert not [finding.name for finding in run.findings() if finding.name == "not_there"]
    (job,) = server.created
    assert job["metadata"]["annotations"] == {kubeflow_agent.FOLDER: str(run.folder.path)}
    limits = job["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert (limits, job["spec"]["trainer"]["numNodes"]) == ({"cpu": 1}, 2)
    for added in ("annotations", "namespace", "creationTimestamp"):
        job["metadata"].pop(added)
    assert job["spec"]["runtimeRef"].pop("kind") == "ClusterTrainingRuntime"
    job["spec"]["trainer"]["resourcesPerNode"].pop("requests")
    jsonschema.validate(job, SCHEMA)


@sdk
def test_a_job_that_fails_says_which_rank_and_where(server, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint('begun')\nassert os.environ['RANK'] != '1', 'no luck'\n")
    run = submitted("train.py", nproc=2).wait(120)
    words = run.state.words
    assert words.startswith("failed (TrainJob train"), words
    assert "rank 1 failed" in words and "AssertionError: no luck (train.py:3" in words
    assert "no luck" in run.logs(1) and "begun" in run.logs(0)


@sdk
def test_stop_deletes_a_job_that_waits_and_one_that_runs(server, tmp_path, capsys):
    (tmp_path / "train.py").write_text("import os, time\nprint('begun', os.environ['RANK'])\ntime.sleep(600)\n")
    server.waits = True
    waiting = submitted("train.py", nproc=2)
    wait_until(lambda: waiting.state.queue is not None)
    assert waiting.state.words.endswith("of Kubeflow is created: 0 of 1 pods run")
    waiting.stop()
    assert waiting.state.words == "stopped" and not server.jobs
    server.waits = False
    run = submitted("train.py", nproc=2)
    wait_until(lambda: "begun 1" in run.logs(1))
    supervisor = psutil.Process(run.state.status.supervisor.pid)
    supervisor.kill()
    supervisor.wait(60)
    again = Run.attach(run.name)  # as another kernel does: the job is found, and followed by a new supervisor
    assert again.state.status.supervisor.pid != supervisor.pid and len(server.jobs) == 1
    status = {"progressPercentage": 42, "metrics": [{"name": "loss", "value": "0.5"}]}
    next(iter(server.jobs.values()))["status"] = {"trainerStatus": status}
    wait_until(lambda: again.state.words.endswith("is running: 42 % done, loss 0.5"))
    assert called("stop", run.name) == 0
    assert again.state.words == "stopped" and not server.jobs
    assert again.logs(1).count("begun 1") == 1


@sdk
def test_a_run_folder_cannot_delete_a_job_of_another_folder(server, runs):
    server.waits = True
    run = submitted("ddp", nproc=2, **{name: value for name, value in SMALL.items() if name != "device"})
    (name,) = server.jobs
    copied = run.folder.copy(runs / "copied")
    job = copied.read_launch().trainjob
    kubeflow_agent.cancel(job, copied)
    assert name in server.jobs
    kubeflow_agent.cancel(TrainJob("nothing", job.namespace, job.context, 1, 1), run.folder)
    run.stop()
    assert name not in server.jobs


@sdk
def test_what_the_cluster_refuses_is_one_sentence(server, runs, capsys, monkeypatch, tmp_path):
    server.refuses = 'trainjobs is forbidden: User "me" cannot create resource'
    arguments = ("submit", "ddp", "--nproc", "2", "--engine", "kubeflow", "--device", "cpu")
    assert called(*arguments) == 1
    said = capsys.readouterr().err
    assert f"the cluster {server.url} refused the job: {server.refuses}" in said and said.count("\n") == 1
    config = tmp_path / "cluster" / "config"
    config.write_text(config.read_text().replace(server.url, "http://127.0.0.1:1"))
    assert called(*arguments) == 1
    assert "refused the job: [Errno 111] Connection refused" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert called(*arguments) == 1
    assert "no cluster was found" in capsys.readouterr().err
    assert not list(runs.iterdir())


@pytest.mark.skipif(has("kubeflow"), reason="the package of the extra kubeflow is installed")
def test_without_the_sdk_the_fix_is_named(runs):
    with pytest.raises(LaunchError, match="setup --with kubeflow, or write the file of the job with -o"):
        submit("ddp", nproc=2, engine="kubeflow", **SMALL)
    assert not runs.exists()
