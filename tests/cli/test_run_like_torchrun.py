"""What a script can notice of how it was started: the same as under python and bare torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from fabricate import FakeRun
from places import SCRIPTS

from labkit import Run, Spec, SpecError, run
from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.plan.script import command
from labkit.record.files import whole
from labkit.setup.environment import CLONE

FACTS = """\
import sys
print(sys.argv, sys.path[0], __name__, __file__, __package__)
print(__spec__ and (__spec__.name, __spec__.parent, __spec__.origin))
print(sys.modules["__main__"].__dict__ is globals(), [name for name in ("__loader__", "__doc__") if name in globals()])
"""
PROBES = SCRIPTS / "probes.py"
ENDS = {
    "exits": "raise SystemExit(7)",
    "raises": "def f():\n    raise ValueError('here')\nf()",
    "imports_nothing": "import package_that_is_nowhere",
}


@pytest.fixture
def project(tmp_path) -> Path:
    return project_in(tmp_path)


def project_in(folder: Path) -> Path:
    """A folder with a script, and a package of modules that end in every way."""
    (folder / "pkg" / "inner").mkdir(parents=True)
    (folder / "broken").mkdir()
    for path in ("pkg/__init__.py", "pkg/inner/__init__.py"):
        (folder / path).touch()
    (folder / "broken" / "__init__.py").write_text("import package_that_is_nowhere\n")
    (folder / "broken" / "mod.py").touch()
    for path in ("script.py", "pkg/mod.py", "pkg/__main__.py", "pkg/inner/mod.py"):
        (folder / path).write_text(FACTS)
    for name, code in ENDS.items():
        (folder / "pkg" / f"{name}.py").write_text(code)
    return folder


RUN = (
    ("script.py", "a", "--b"),
    ("./script.py",),
    ("pkg/../script.py", "-m"),
    *(("-m", f"pkg{name}", "a", "-m") for name in ("", ".mod", ".inner.mod", *(f".{end}" for end in ENDS))),
)
CANNOT_RUN = tuple(("-m", name) for name in ("nowhere", "pkg.nowhere", "pkg.mod.nowhere", "pkg.inner", "broken.mod"))


def ends(project: Path, *arguments: str | Path, **settings) -> tuple[int, str, str]:
    env = {**os.environ, "PYTHONPATH": str(CLONE)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, env=env, capture_output=True, text=True, timeout=240, **settings
    )
    return done.returncode, done.stdout, without_runpy(done.stderr)


def without_runpy(error: str) -> str:
    return "\n".join(line for line in error.splitlines() if "runpy" not in line)


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> tuple[Path, dict[tuple[str, ...], tuple[int, str, str]]]:
    """A project, and how the probe ended with each of RUN and CANNOT_RUN; it is forked from one process."""
    project, told, every = (
        project_in(tmp_path_factory.mktemp("project")),
        tmp_path_factory.mktemp("told"),
        RUN + CANNOT_RUN,
    )
    code, out, error = ends(project, PROBES, told, input=json.dumps(every))
    assert code == 0, error
    output = [[(told / f"{number}.{kind}").read_text() for kind in ("out", "err")] for number in range(len(every))]
    return project, {
        each: (code, out, without_runpy(error)) for each, code, (out, error) in zip(every, json.loads(out), output)
    }


@pytest.mark.parametrize("arguments", [RUN[0], RUN[-1]])
def test_probe_is_a_module_that_runs_scripts_as_python_does(project, arguments):
    assert ends(project, "-m", "labkit.probe", *arguments) == ends(project, *arguments)


@pytest.mark.parametrize("arguments", RUN)
def test_probe_runs_scripts_and_modules_as_python_does(probed, arguments):
    project, told = probed
    assert told[arguments] == ends(project, *arguments)


@pytest.mark.parametrize("arguments", CANNOT_RUN, ids=lambda arguments: arguments[1])
def test_a_module_that_cannot_run_ends_as_under_python(probed, arguments):
    project, told = probed
    code, out, error = told[arguments]
    assert (code, out) == ends(project, *arguments)[:2] and code == 1
    assert ("package_that_is_nowhere" if arguments[1] == "broken.mod" else "No module named") in error
    assert "labkit/probe" not in error


def test_the_command_says_how_a_module_is_run(project, monkeypatch):
    monkeypatch.chdir(project)
    (spec,) = cli.parse(["run", "-m", "pkg.mod", "--nproc", "2", "--", "--lr", "0.1"]).specs
    assert (spec.script, spec.as_module, spec.args) == ("pkg.mod", True, ("--lr", "0.1"))
    assert command(spec) == "torchrun --standalone --nproc-per-node=2 -m pkg.mod --lr 0.1"
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert command(Spec(script="sub/train.py", nproc=2)).endswith(" sub/train.py")


@pytest.mark.parametrize("module", ["pkg.nowhere", "nowhere", "pkg.inner", "pkg/mod.py", "pkg.mod.x", ""])
def test_a_module_that_is_not_there_is_refused_before_anything_starts(project, monkeypatch, runs, module):
    monkeypatch.chdir(project)
    with pytest.raises(SpecError) as caught:
        run(module, as_module=True, nproc=1)
    assert caught.value.field == "script"
    assert not runs.exists()


@pytest.mark.parametrize("arguments", [["run"], ["run", "ddp", "-m", "pkg.mod"]])
def test_a_run_is_of_one_thing(capsys, arguments):
    with pytest.raises(SystemExit):
        cli.parse(arguments)
    assert "name a strategy, the path of a script, or -m MODULE" in capsys.readouterr().err


# ---- real ranks

READS = """\
import json, os, sys
rank = os.environ["RANK"]
print(json.dumps({"argv": sys.argv, "stdin": sys.stdin.read(), "cwd": os.getcwd()}), flush=True)
print("an error of rank", rank, file=sys.stderr, flush=True)
"""


def labkit(folder: Path, *arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(CLONE)}
    return subprocess.run(
        [sys.executable, "-m", "labkit", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **settings,
    )


def test_rank_0_reads_standard_input_and_every_rank_has_its_name_as_written(project, start):
    (project / "sub").mkdir()
    (project / "sub" / "reads.py").write_text(READS)
    text = "line\n" * 50_000  # more than a pipe holds
    done = labkit(
        project, "run", "sub/reads.py", "--nproc", "2", "--device", "cpu", "--", "x y", input=text, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(labkit(project, "logs", "--rank", rank, timeout=120).stdout) for rank in ("0", "1")]
    assert [one["stdin"] for one in told] == [text, ""]
    assert all(one["argv"] == ["sub/reads.py", "x y"] and one["cwd"] == str(project) for one in told)
    assert labkit(project, "logs", "--rank", "1", "--stream", "stderr", timeout=120).stdout == "an error of rank 1\n"
    refused = labkit(project, "logs", "--rank", "2", timeout=120)
    assert (
        refused.returncode == 2
        and "rank must be an integer from 0 to 1 in run" in refused.stderr
        and "Traceback" not in refused.stderr
    )


def test_a_module_runs_on_ranks_and_from_python_standard_input_is_empty(project, start, monkeypatch):
    (project / "pkg" / "reads.py").write_text(READS)
    monkeypatch.chdir(project)
    job = run("pkg.reads", as_module=True, nproc=2, device="cpu", args=["x"]).wait(300)
    assert job.words == "finished", job.logs(0, "stderr")
    for rank in (0, 1):
        told = json.loads(job.logs(rank))
        assert told == {"argv": [str(project / "pkg" / "reads.py"), "x"], "stdin": "", "cwd": str(project)}
    assert job.folder.command.read_text().endswith(" -m pkg.reads x\n")


# ---- logs


@pytest.fixture
def restarted(runs) -> FakeRun:
    fake = FakeRun(runs)
    fake.start()
    fake.say(0, "first, cut sho")
    second = fake.logs[0].parent.parent / "attempt_1" / "0"
    second.mkdir(parents=True)
    (second / "stdout.log").write_bytes("second \x1b[31m\xff\n".encode("latin-1"))
    yield fake
    fake.close()


def test_logs_are_those_of_all_attempts(restarted, capsysbinary):
    job = Run.attach(restarted.folder.path)
    assert job.logs(0) == "first, cut sho\n──── attempt 1 ────\nsecond \x1b[31m\ufffd\n"
    assert job.logs(1) == "" and job.logs(0, "stderr") == ""
    restarted.end()
    assert act(cli.parse(["logs", restarted.folder.name])) == 0
    assert capsysbinary.readouterr().out == "first, cut sho\n──── attempt 1 ────\nsecond \x1b[31m".encode() + b"\xff\n"


def test_logs_are_read_block_by_block(tmp_path):
    path = tmp_path / "none_x" / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 3_000_000)
    blocks = list(whole(lambda: [path]))
    assert b"".join(blocks) == path.read_bytes()
    assert max(map(len, blocks)) <= 1 << 18


def test_followed_logs_go_on_into_the_next_attempt(tmp_path):
    folder = tmp_path / "none_x"
    paths = [folder / f"attempt_{number}" / "0" / "stdout.log" for number in (0, 1)]
    for path in paths:
        path.parent.mkdir(parents=True)
    paths[0].write_text("a")
    steps = iter([lambda: paths[0].open("a").write("b\n"), lambda: paths[1].write_text("c\n"), lambda: None])
    said, over = [], []
    for block in whole(lambda: [path for path in paths if path.exists()], lambda: not over):
        said.append(block)
        if not block:
            step = next(steps, None)
            step() if step else over.append(True)
    assert b"".join(said) == "ab\n──── attempt 1 ────\nc\n".encode()


def test_logs_follow_a_run_to_its_end(runs, project):
    fake = FakeRun(runs)
    fake.start()
    fake.say(1, "before\n")
    env = {**os.environ, "PYTHONPATH": str(CLONE)}
    argv = [sys.executable, "-m", "labkit", "logs", fake.folder.name, "--rank", "1", "--follow"]
    with subprocess.Popen(argv, cwd=project, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "before\n"
        fake.say(1, "after\n")
        assert process.stdout.readline() == "after\n"
        fake.say(1, "last\n")
        fake.end()
        assert process.stdout.read() == "last\n"
        assert wait_until(lambda: process.poll() is not None) and process.returncode == 0
    fake.close()
