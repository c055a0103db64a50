"""Runs on a real Slurm with two nodes on this host: submitted, followed, cancelled."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import clusters
import psutil
import pytest
from commands import called
from conftest import wait_until
from strategies_at_once import check_losses, script_of_all

from labkit.analysis.summary import summarise
from labkit.jobs import Profile, of_spec, sbatch
from labkit.launch.job import LaunchError
from labkit.launch.slurm_agent import cancel, job_of
from labkit.plan.spec import Spec
from labkit.runs.gathering import submit
from labkit.runs.handle import Run, with_ranks

SMALL = {"workload": "mlp", "samples": 512, "batch_size": 32, "device": "cpu"}
real = pytest.mark.skipif(bool(clusters.missing()), reason=f"no Slurm: {clusters.missing()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Slurm for the tests of this module."""
    with clusters.slurm(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture
def at_cluster(cluster, monkeypatch, tmp_path):
    """This process as if on a login node of the cluster; no job is left at the end of the test."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.chdir(tmp_path)
    yield
    own = {"env": os.environ | {"SLURM_CONF": str(cluster)}, "check": True}
    subprocess.run(["scancel", "--user=root"], **own)
    wait_until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, **own).stdout)


def queued(run: Run) -> str:
    return run.state.queue.state if run.state.queue else ""


@real
def test_two_nodes_train_as_one_machine(at_cluster, shared_run, tmp_path):
    run = submit(script_of_all(tmp_path), nproc=2, nodes=2, device="cpu")
    assert isinstance(run, Run)
    run.wait(240)
    assert run.state.words == "finished", run.folder.end_of(run.folder.launcher_log)
    check_losses(list(run.state.ranks.values()), shared_run)
    found = run.summary()
    assert (found["world_size"], [rank["exit_code"] for rank in found["ranks"]]) == (2, [0, 0])
    assert [run.logs(rank).count("step 4: loss") for rank in range(2)] == [2, 1]  # the last stage of PP reports
    state = run.state
    assert (state.queue.state, state.queue.nodes) == ("COMPLETED", "labkit[1-2]")
    assert summarise(state, run.name).state == "finished"


@real
def test_stop_cancels_a_job_that_waits_and_one_that_runs(at_cluster, tmp_path):
    (tmp_path / "train.py").write_text("import os, time\nprint('begun', os.environ['RANK'])\ntime.sleep(600)\n")
    first = submit("train.py", nproc=8, nodes=2)  # all cores of both nodes
    wait_until(lambda: "begun 7" in first.logs(7))
    second = submit("train.py", nproc=2, nodes=2)
    wait_until(lambda: queued(second) == "PENDING")
    words = f"job {second.state.queue.job} of Slurm is pending: Resources"
    wait_until(lambda: second.state.words == words)  # the reason comes after the state
    supervisor = psutil.Process(first.state.status.supervisor.pid)
    supervisor.kill()
    supervisor.wait(60)
    first = Run.attach(first.name)  # as another kernel does: the job is found, and followed by a new supervisor
    assert first.state.words != "lost" and first.state.status.supervisor.pid != supervisor.pid
    assert job_of(first.state.queue.job)["state"] == "RUNNING"
    for run in (second, first):
        assert run.stop().state.words == "stopped"
        wait_until(lambda run=run: job_of(run.state.queue.job)["state"] == "CANCELLED")


@real
@pytest.mark.slow
def test_a_job_that_fails_says_why(at_cluster, tmp_path, capsys):
    (tmp_path / "train.py").write_text("import os\nassert os.environ['RANK'] != '1', 'no luck'\n")
    run = submit("train.py", nproc=2, nodes=2).wait(240)
    assert run.state.words == "failed (rank 1: AssertionError: no luck)"
    assert "no luck" in run.logs(1, "stderr")


@real
@pytest.mark.slow  # Slurm holds a requeued job for two minutes
def test_a_checkpointed_job_resumes_when_slurm_requeues_it(at_cluster):
    """What the trap does before the time limit, at once: the signal of Slurm is sent to the batch shell."""
    run = submit("ddp", nproc=1, nodes=1, steps=20_000, save_every=10_000, **SMALL | {"samples": 2048})
    job = wait_until(lambda: run.state.queue and run.state.queue.job)
    wait_until(lambda: "step 20: loss" in run.logs(0) or run.state.over)
    subprocess.run(["scancel", "--batch", "--signal=USR1", str(job)], check=True)
    wait_until(lambda: "resuming from" in run.logs(0) or run.state.over, 180)
    assert "resuming from" in run.logs(0), run.folder.end_of(run.folder.launcher_log)
    run.stop()


@real
def test_a_run_folder_cannot_cancel_a_job_of_another_folder(at_cluster, tmp_path):
    done = subprocess.run(
        ["sbatch", "--parsable", "--hold", "--wrap", "sleep 60"], capture_output=True, text=True, check=True
    )
    job = int(done.stdout)
    other = tmp_path / "job.sbatch"
    other.write_text("")
    cancel(job, other)
    assert job_of(job)["state"] == "PENDING"
    cancel(job)
    assert job_of(job)["state"] == "CANCELLED"
    assert job_of(999_999) == {"state": "UNKNOWN"}


@real
def test_refusals_of_slurm_are_passed_on(at_cluster, tmp_path, monkeypatch, capsys, runs):
    (tmp_path / "labkit.conf").write_text("[profile wrong]\npartition = none\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert called("submit", "ddp", "--nproc", "2", "--profile", "wrong") == 1
    said = capsys.readouterr().err
    assert "Slurm refused the job: invalid partition specified: none" in said
    assert "sinfo lists the partitions" in said
    assert not list(runs.iterdir())


def test_without_slurm_the_fix_is_named(monkeypatch, tmp_path, runs):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no sbatch on the PATH; run this on a login node"):
        submit("ddp", nproc=2, **SMALL)
    assert not runs.exists()


def test_a_batch_file_has_the_settings_of_the_profile(tmp_path):
    profile = Profile("gpu", "course", "2-00:00:00", "a100", "8", "images/torch.sif", "cuda/12.8", "source venv")
    job = of_spec(with_ranks(Spec("ddp", nproc=8, device="cuda", precision="bf16", save_every=5)), nodes=2)
    text = sbatch(job, profile)
    for line in (
        "--partition=gpu",
        "--account=course",
        "--time=2-00:00:00",
        "--nodes=2",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=32",
        "--requeue",
        "--signal=B:USR1@120",
    ):
        assert f"#SBATCH {line}" in text
    assert text.index("module load cuda/12.8") < text.index("source venv") < text.index("srun")
    assert 'apptainer exec --nv --bind "$PWD" images/torch.sif' in text
    assert "SLURM_LAUNCH_NODE_IPADDR" not in [word for word in text.split() if word.startswith("$")]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "save=save " in text and text.index('touch "$save"') < text.index("scontrol requeue") < text.index("srun")
    single = sbatch(of_spec(with_ranks(Spec("ddp", nproc=2, device="cpu"))), Profile(container="torch:2"))
    assert "--no-requeue" in single and "scontrol requeue" not in single
    assert "--container-image=torch:2" in single
    subprocess.run(["bash", "-n"], input=single, text=True, check=True)


@pytest.mark.parametrize(("engine", "fix"), [("kubeflow", "kubectl create -f"), ("skypilot", "sky launch")])
def test_other_engines_write_a_file(tmp_path, monkeypatch, capsys, engine, fix, runs):
    monkeypatch.chdir(tmp_path)
    path = Path(f"ddp-x2-{engine}.yaml")
    named = ["-o", str(path)] if engine == "kubeflow" else []  # without it, Kubeflow gets the job
    assert called("submit", "ddp", "--nproc", "2", "--nodes", "2", "--engine", engine, *named) == 0
    assert f"nothing was submitted; submit it with: {fix} {path}" in capsys.readouterr().out
    assert "import torch" in path.read_text()
    assert called("submit", "ddp", "--nproc", "2", "--engine", engine, "--json", "-o", "own.yaml") == 0
    assert json.loads(capsys.readouterr().out) == {"file": "own.yaml"}
    assert not runs.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "pbs"), "--engine must be one of slurm, kubeflow, skypilot, got 'pbs'"),
        (("-o", "x.yaml"), "-o x.yaml has no effect with --engine slurm"),
        (("--nodes", "3"), "2 ranks cannot be divided equally among 3 nodes"),
        (("--engine", "kubeflow", "-o", "none/x.yaml"), "none/x.yaml cannot be written"),
    ],
)
def test_what_cannot_be_submitted_is_refused(arguments, said, capsys):
    assert called("submit", "ddp", "--nproc", "2", *arguments) in (1, 2)
    assert said in capsys.readouterr().err
