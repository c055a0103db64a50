"""Every command that takes a path, with what is no regular file there: it neither blocks nor reads without an end, and
says in one sentence what is wrong."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench import results
from commands import recorded_run
from foreign import command

from labkit.common.files import open_regular, read_regular
from labkit.setup import limits

pytestmark = pytest.mark.thorough

KINDS = ("fifo", "socket", "folder", "loop", "zero", "null", "sparse", "dangling", "empty", "binary")
_SECONDS = 60  # a limit for a command that must return at once, on a busy machine

# `{path}` is the special file, with the suffix that the command expects.
COMMANDS = [
    *("unpack {path}", "unpack {path}.zip -o new", "pack {path}.py", "pack {path}", "predict {path}.py"),
    *(
        "run {path}.py --device cpu",
        "run ddp --device cpu --steps 1 --resume {path}",
        "show {path}",
        "show {path} --json",
    ),
    *("logs {path}", "stop {path}", "trace {path}", "replay {path}", "capture {path}", "compare {path}"),
    *("gather {path} {path} -o new", "handout {path}", "handout {path}.py", "handout {path}.ipynb", "notebook {path}"),
    *("notebook {path}.py", "notebook {path}.ipynb", "handout lab.py --recorded {path}", "advise --config {path}"),
    *("explain {path}", "explain {path}.json --json"),
    *("submit {path}.py --engine kubeflow", "handout {run} -o {path}/page.html", "bench --only x --results {path}"),
]


def special(path: Path, kind: str) -> None:
    """Something else than a file with what is asked for."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(path.name)  # in the working directory, because the path of a socket must be short
    elif kind == "folder":
        path.mkdir()
    elif kind in ("loop", "zero", "null", "dangling"):
        path.symlink_to({"loop": path, "zero": "/dev/zero", "null": "/dev/null", "dangling": "nowhere"}[kind])
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 20 << 30)
    else:
        path.write_bytes(b"" if kind == "empty" else os.urandom(4096))


def refusals(said: str) -> list[str]:
    """The sentences with which a command was refused."""
    return [line for line in said.splitlines() if line.startswith("labkit: ")]


@contextmanager
def limit() -> Iterator[None]:
    """Fails if the block does not return, also while it waits in the kernel."""

    def late(*_: object) -> None:
        raise AssertionError("it does not return")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_file_is_refused_by_every_command(here, runs, kind):
    run = recorded_run(runs).folder.name
    (here / "lab.py").write_text("# %% [markdown]\n# # A lab\n#\n# Text.\n")
    for suffix in ("", ".py", ".ipynb", ".zip"):
        special(here / f"s{suffix}", kind)
    before = {path.name: os.lstat(path).st_mode for path in here.iterdir()}
    for text in COMMANDS:
        if kind in ("empty", "binary") and text.startswith(("run", "predict", "pack", "submit")):
            continue  # it is a script, which is right or wrong when it runs
        arguments = text.format(path="s", run=run).split()
        with limit():
            code, said = command(*arguments)
        allowed = kind == "folder" and "-o" in arguments  # a page may be written to a folder
        assert (code in (1, 2) and refusals(said)) or allowed, (text, code, said)
    after = {path.name: os.lstat(path).st_mode for path in here.iterdir()}
    assert before.items() <= after.items()
    assert set(after) - set(before) <= {"runs"}, "something was left"


@pytest.mark.parametrize("kind", KINDS)
def test_runs_next_to_a_special_file_are_listed(here, runs, kind, monkeypatch):
    """In the folder of the runs, in a run folder, and as the folder of the runs itself."""
    run = recorded_run(runs)
    special(here / "s", kind)
    (here / "s").rename(runs / "s")
    for name in ("summary.json", "guess.json", "plan.json", "system.jsonl", "train.py", "command.txt"):
        special(here / "t", kind)
        path = run.folder.path / name
        path.unlink(missing_ok=True)
        (here / "t").rename(path)
        for arguments in (["runs"], ["show"], ["show", "--json"], ["replay", "--speed", "1000"], ["compare"]):
            with limit():
                assert command(*arguments)[0] in (0, 1, 2)
        with limit():
            assert command("handout", run.folder.name, "-o", str(here / "page.html"))[0] in (0, 1, 2)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    monkeypatch.setenv("LABKIT_RUNS", str(runs / "s"))
    for arguments in (["runs"], ["show"], ["progress"], ["clean"]):
        with limit():
            assert command(*arguments)[0] in (0, 1, 2)


@pytest.mark.parametrize(
    "name", ["/", ".", "..", "", "/.", "//", "-", "~", "\n", "\x1b[2J", "a" * 5000, "/proc/self/mem"]
)
def test_odd_names_are_refused(here, runs, name):
    recorded_run(runs)
    for text in (one for one in COMMANDS if "page.html" not in one):  # which may be written to a folder
        arguments = [word.format(path=name, run="last") for word in text.split()]
        with limit():
            code, said = command(*arguments)
        if name == ".." and arguments[0] == "explain":
            continue  # the folder above may have logs of a job
        assert code in (1, 2), (arguments, said)
        assert refusals(said), (arguments, said)


def test_configuration_files_and_results_are_regular_files(here):
    for kind in ("fifo", "socket", "folder", "loop", "zero", "sparse"):
        special(here / kind, kind)
        with limit(), pytest.raises(limits.ConfigError, match="cannot be read"):
            limits.sections(here / kind)
        if kind != "sparse":
            with limit(), pytest.raises(ValueError, match="must name a file that can be read"):
                results.read(here / kind)
        with limit(), pytest.raises(OSError):
            read_regular(here / kind, 1 << 20)


def test_a_file_and_a_link_to_it_are_read(here):
    (here / "file").write_bytes(b"12345")
    (here / "link").symlink_to("file")
    assert read_regular("link", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(here / "link", 4)
    with open_regular(here / "file") as file:
        assert file.read() == b"12345"
