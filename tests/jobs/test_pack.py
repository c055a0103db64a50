"""Jobs that leave the lab: what a packed zip contains and that it runs without labkit."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from commands import called
from fabricate import FakeRun
from places import SCHEMAS
from weaving import run_alone

from labkit import jobs
from labkit.frontends.panel.sources import Pack
from labkit.plan.spec import Spec, SpecError
from labkit.record import packed
from labkit.runs.handle import with_ranks
from labkit.setup.environment import has

SMALL = {"workload": "mlp", "samples": 256, "batch_size": 32, "steps": 3, "device": "cpu"}


def job_of(what: str, nodes: int = 1, **fields) -> jobs.Portable:
    return jobs.of_spec(with_ranks(Spec(what, **SMALL | fields)), nodes)


def checked(text: str, schema: str) -> dict:
    document = yaml.safe_load(text)
    jsonschema.validate(document, json.loads((SCHEMAS / f"{schema}.json").read_text()))
    return document


@pytest.mark.thorough
def test_a_packed_job_runs_on_two_nodes_with_bare_torchrun(tmp_path, monkeypatch):
    """Both commands at once in the same empty folder, with nothing of labkit in reach of the script."""
    path = jobs.pack(job_of("ddp", nodes=2, nproc=2), jobs.Profile(), tmp_path / "job.zip")
    folder = tmp_path / "empty"
    assert set(packed.unpack(path, folder)) == {entry.filename for entry in zipfile.ZipFile(path).infolist()}
    assert not [
        line for line in (folder / "train.py").read_text().splitlines() if "labkit" in line and "import" in line
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LABKIT", "PYTHONPATH"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            shlex.split(line.replace("HOST", "127.0.0.1").replace("29500", str(port))),
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in (folder / "torchrun.txt").read_text().splitlines()
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "step 3: loss" in said[0]
    assert "loss" not in said[1]  # rank 1, which does not print


def test_a_packed_job_draws_its_data_first(tmp_path):
    files = jobs.contents(job_of("ddp", nproc=2, samples=2_000), jobs.Profile())
    (command,) = re.findall(r"`python (draw_digits\.py [^`]*)`", files["README.md"])
    for name in ("job.sbatch", "trainjob.yaml", "skypilot.yaml"):
        text = files[name]
        assert text.index(f"python {command}") < text.index("torchrun", text.index(f"python {command}"))
    assert "draw" not in "".join(jobs.contents(job_of("ddp", workload="gpt", nproc=2), jobs.Profile()).values())
    for name in ("train.py", "draw_digits.py"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    run_alone([sys.executable, *shlex.split(command)], tmp_path, environment=own)
    code = "import runpy; print(len(runpy.run_path('train.py')['load_data']()[0]))"
    assert run_alone([sys.executable, "-c", code], tmp_path, environment=own) == "2000\n"
    assert (tmp_path / "cache" / "labkit" / "digits-28.pt").is_file()


def test_the_same_job_is_the_same_zip(tmp_path):
    job = job_of("fsdp2", nproc=2)
    one, other = (jobs.pack(job, jobs.Profile(), tmp_path / name) for name in ("a.zip", "b.zip"))
    assert one.read_bytes() == other.read_bytes()


def test_job_files_follow_their_schemas():
    profile = jobs.Profile(gpu="H100", cpus="4", container="pytorch/pytorch", setup="source /opt/venv/bin/activate")
    job = job_of("ddp", nodes=2, nproc=8, device="cuda", max_restarts=2)
    files = jobs.contents(job, profile)
    trainer = checked(files["trainjob.yaml"], "trainjob")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    task = checked(files["skypilot.yaml"], "skypilot")
    assert (task["num_nodes"], task["resources"]["accelerators"], task["resources"]["cpus"]) == (2, "H100:4", "16+")
    for text in (trainer["command"][2], task["setup"] + task["run"]):
        assert "source /opt/venv/bin/activate" in text
        assert "--max-restarts=2 train.py" in text
    assert task["run"].count("torchrun") == 1


@pytest.mark.skipif(not has("skypilot"), reason="the package of the extra skypilot is not installed")
def test_skypilot_reads_its_file(tmp_path, monkeypatch, capsys):
    from sky import Task

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labkit.conf").write_text("[profile good]\ngpu = A100\ncpus = 4\n[profile wrong]\ngpu = A100:many\n")
    arguments = ("submit", "ddp", "--nproc", "8", "--nodes", "2", "--engine", "skypilot", "--profile")
    assert called(*arguments, "good", "-o", "task.yaml") == 0
    task = Task.from_yaml("task.yaml")
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.cpus) == (2, {"A100": 4}, "16+")
    assert called(*arguments, "wrong", "-o", "wrong.yaml") == 2
    said = capsys.readouterr().err
    assert "SkyPilot refuses the task" in said and "check gpu" in said and said.count("\n") == 1
    assert not (tmp_path / "wrong.yaml").exists()


def test_the_command_of_a_trainjob_writes_the_files_of_the_job(tmp_path):
    """The shell that a pod starts, without torchrun and pip; `$(` and `$$` are decoded as Kubernetes does."""
    (tmp_path / "train.py").write_text("import helper\nprint('$(HOME) $$ END_OF_FILE_0')\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    job = jobs.of_spec(Spec(script=str(tmp_path / "train.py"), nproc=1, device="cpu"))
    text = checked(jobs.contents(job, jobs.Profile())["trainjob.yaml"], "trainjob")["spec"]["trainer"]["command"][2]
    shell = text.replace("$$", "$")
    place = tmp_path / "pod"
    place.mkdir()
    silent = "pip() { :; }\ntorchrun() { :; }\n"
    subprocess.run(["bash", "-c", silent + shell], cwd=place, check=True)
    for name in ("train.py", "helper.py"):
        assert (place / "job" / name).read_text() == (tmp_path / name).read_text()


def test_a_user_script_is_packed_with_the_modules_that_it_imports(tmp_path, monkeypatch):
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "__init__.py").write_text("")
    (tmp_path / "pieces" / "model.py").write_text("import rich\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "train.py").write_text("from pieces import model\nimport json, not_installed\n")
    monkeypatch.chdir(tmp_path)
    assert called("pack", "train.py", "--nproc", "2", "--", "--lr", "0.1") == 0
    assert called("unpack", "train-x2.zip", "-o", "out") == 0
    assert {path.name for path in (tmp_path / "out").rglob("*.py")} == {"train.py", "__init__.py", "model.py"}
    assert "train.py --lr 0.1" in (tmp_path / "out/torchrun.txt").read_text()
    pinned = (tmp_path / "out/requirements.txt").read_text().split()
    assert [line.partition("==")[0] for line in pinned] == ["rich", "torch"]


def test_a_module_is_packed_with_its_package(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    for name in ("__init__", "train", "layers", "other"):
        (tmp_path / "own" / f"{name}.py").write_text("from own import layers\n" if name == "train" else "")
    monkeypatch.chdir(tmp_path)
    job = jobs.of_spec(Spec(script="own.train", as_module=True, nproc=2))
    assert set(job.files) == {"own/__init__.py", "own/train.py", "own/layers.py"}
    assert job.target == ("-m", "own.train")


def test_a_recorded_run_is_packed_as_it_ran(runs, tmp_path, monkeypatch):
    run = FakeRun(runs, nproc=4, max_restarts=1)
    run.writers[0].write("start", pid=1, host="there", local_rank=0, world_size=4, device="cpu", torch="2.9.1+cu128")
    run.folder.script.write_text("import torch  # as it ran\n")
    run.end()
    monkeypatch.chdir(tmp_path)
    assert called("pack", "last", "--nodes", "2", "-o", "job.zip") == 0
    with zipfile.ZipFile("job.zip") as packed:
        assert packed.read("train.py") == b"import torch  # as it ran\n"
        pinned = packed.read("requirements.txt").decode().split()  # what draws the data needs scikit-learn
        assert [line.partition("==")[0] for line in pinned] == ["scikit-learn", "torch"] and pinned[1] == "torch==2.9.1"
        assert packed.read("torchrun.txt").count(b"--nproc-per-node=2 --max-restarts=1") == 2
    assert called("pack", "last", "--steps", "3") == 2  # it has run


def test_a_job_does_not_depend_on_a_checkpoint_of_this_machine(tmp_path):
    spec = with_ranks(Spec("ddp", nproc=2, **SMALL))
    assert jobs.of_spec(replace(spec, resume=str(tmp_path))).files == jobs.of_spec(spec).files


@pytest.mark.parametrize(
    ("fields", "nodes", "said"),
    [
        ({"what": "ddp", "nproc": 3}, 2, "3 ranks cannot be divided equally among 2 nodes"),
        ({"what": "dp", "nproc": 2}, 2, "a strategy with one process per device"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(fields, nodes, said):
    with pytest.raises(SpecError, match=said):
        job_of(**fields, nodes=nodes)


def test_a_profile_is_read_from_both_files(tmp_path, monkeypatch):
    system, own = tmp_path / "system.conf", tmp_path / "labkit.conf"
    monkeypatch.setattr("labkit.setup.limits.SYSTEM", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert jobs.profile() == jobs.Profile()
    system.write_text("[profile gpu]\npartition = a100\naccount = all\nmodules = cuda/12.4 gcc\n")
    own.write_text("[profile gpu]\naccount = me\ntime = 2-00:00:00\n")
    found = jobs.profile("gpu")
    assert (found.partition, found.account, found.time, found.modules) == ("a100", "me", "2-00:00:00", "cuda/12.4 gcc")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profile gpu]\npartitoin = a\n", "has no 'partitoin'; it may have: partition"),
        ("[profile gpu]\ntime = soon\n", "time in .* must be such as 01:30:00"),
        ("[profile gpu]\npartition = a; rm -rf\n", "must be one word"),
        ("[profile gpu]\ncpus = -1\n", "number of cores per rank"),
        ("partition = a\n", "not a valid configuration file"),
        ("[profile cpu]\n", "no profile 'gpu'; add a section"),
    ],
)
def test_an_invalid_profile_is_refused_with_its_file(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr("labkit.setup.limits.SYSTEM", tmp_path / "none")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "labkit.conf").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert called("pack", "ddp", "--nproc", "2", "--profile", "gpu") == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "labkit.conf") in error
    with pytest.raises(ValueError, match=said):
        jobs.profile("gpu")


def test_the_button_packs_what_is_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = with_ranks(Spec("ddp", nproc=2, **SMALL))
    pack = Pack(lambda: spec)
    pack._pack(spec)
    assert str(tmp_path / "ddp-x2.zip") in pack.said.value
    assert zipfile.ZipFile("ddp-x2.zip").testzip() is None
    monkeypatch.setattr("labkit.setup.limits.SYSTEM", tmp_path)  # a folder
    pack._pack(spec)
    assert "cannot be read" in pack.said.value
