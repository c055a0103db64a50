"""Warm starts: a run starts cold if a warm start could behave differently."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from warm import CLONE, ENDS, how, started

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.frontends.panel.lab import Lab
from labkit.launch.job import Job
from labkit.launch.warm import client, fork
from labkit.launch.warm.client import Cold
from labkit.plan.spec import Spec
from labkit.runs import handle


@pytest.fixture
def ends(tmp_path) -> Path:
    path = tmp_path / "ends.py"
    path.write_text(ENDS)
    return path


@pytest.mark.parametrize(
    "name", ["TORCH_LOGS", "OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD", "MKL_NUM_THREADS", "LC_ALL"]
)
def test_a_variable_that_is_read_early_makes_it_cold(name, server, monkeypatch):
    for common, value in client.local.standing_environment().items():
        monkeypatch.setenv(common, value)
    monkeypatch.setenv(
        name, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "LD_PRELOAD": "", "LC_ALL": "C"}.get(name, "1")
    )
    found = client.consent(os.environ, [])
    assert isinstance(found, Cold) and f"the environment variable {name}" in found.reason


def test_a_process_that_has_compiled_starts_warm(server, monkeypatch, tmp_path):
    """torch has then set where its compiler keeps its files; it reads that when it compiles."""
    for common, value in client.local.standing_environment().items():
        monkeypatch.setenv(common, value)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    found = client.consent(os.environ, [])
    assert not isinstance(found, Cold), found


def test_a_process_that_has_imported_scikit_learn_starts_warm(server):
    code = (
        "import json, os; before = dict(os.environ); import sklearn;"
        "print(json.dumps({name: value for name, value in os.environ.items() if before.get(name) != value}))"
    )
    none = {name: value for name, value in os.environ.items() if not name.startswith("KMP_")}
    done = subprocess.run([sys.executable, "-c", code], env=none, capture_output=True, text=True, check=True)
    changed = json.loads(done.stdout)
    assert "KMP_INIT_AT_FORK" in changed
    found = client.consent(client.local.standing_environment() | changed, [])
    assert not isinstance(found, Cold), found
    found._connection.close()


@pytest.mark.parametrize("name", ["LABKIT_RUNS", "RANK", "HOME_OF_MY_DATA", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"])
def test_any_other_variable_leaves_it_warm(name, server):
    found = client.consent(client.local.standing_environment() | {name: "x"}, [])
    assert not isinstance(found, Cold), found
    found._connection.close()


def test_limits_of_the_process_are_inherited_as_under_a_cold_start(server):
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from labkit.launch.warm import client; client.ANSWER = 60\n"
        "print(client.consent(client.local.standing_environment(), []).reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CLONE)
    assert done.stdout == "the warm server differs in the limits of the process\n"


def test_signals_that_the_supervisor_sets_anew_may_be_ignored_and_others_may_not(server):
    """A notebook's kernel ignores SIGINT between two cells."""
    told = []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            told.append(client.facts(os.environ)["the signals that are ignored"])
        finally:
            signal.signal(number, before)
    nothing = client.facts(os.environ)["the signals that are ignored"]
    assert told == [nothing, nothing, nothing | 1 << signal.SIGUSR1 - 1]


def test_a_module_beside_the_script_that_shadows_a_loaded_one_makes_it_cold(server, ends):
    (ends.parent / "numpy.py").write_text("x = 1\n")
    handle = started(ends)
    assert how(handle) == (
        "cold",
        f"the warm server has already imported a different module than {ends.parent / 'numpy.py'}",
    )


@pytest.mark.parametrize("name", ["torch.txt", "torch", "unknown.py", "labkit.md"])
def test_what_is_no_module_shadows_none(name, tmp_path):
    path = tmp_path / name
    path.mkdir() if name == "torch" else path.touch()
    assert client.shadowing({str(tmp_path)}) == ""


def test_the_clone_itself_shadows_nothing():
    assert client.shadowing({str(CLONE)}) == ""


def test_another_version_starts_cold_and_says_so(server, ends, monkeypatch):
    monkeypatch.setattr(client, "_labkit", lambda: "another")
    monkeypatch.setattr("labkit.runs.handle.prepare_after", lambda job: None)  # it would replace the server
    handle = started(ends)
    assert how(handle) == ("cold", "the warm server differs in the version of labkit")
    assert "The run started cold: the warm server differs in the version of labkit." in handle.state.note


def test_the_server_is_started_when_the_first_run_is_over(monkeypatch):
    seen, prepared = [], threading.Event()
    states = iter(["starting", "running", "running", "finished"])

    class First:
        @property
        def state(self):
            seen.append(next(states))
            return seen[-1]

    monkeypatch.setattr("labkit.runs.handle._POLL_INTERVAL", 0.0)
    monkeypatch.setattr("labkit.runs.handle.prepare", lambda environment: prepared.set())
    handle.prepare_after(First())
    assert prepared.wait(60)
    assert seen == ["starting", "running", "running", "finished"]


def test_torch_that_changed_on_disk_starts_cold(server, monkeypatch):
    changed = client._changed
    monkeypatch.setattr(client, "_changed", lambda place: changed(place) + place.endswith("torch/__init__.py"))
    assert (
        client.consent(client.local.standing_environment(), []).reason
        == "the warm server differs in the installed packages"
    )


def test_other_systems_start_cold(monkeypatch):
    monkeypatch.setattr(client, "_AVAILABLE", False)
    assert client.consent({}, []) == client.about() == Cold()


def test_cold_can_be_asked_for(server, ends, monkeypatch):
    assert how(started(ends, cold=True)) == ("cold", "")
    assert started(ends).summary()["start"] == "warm"
    with monkeypatch.context() as patch:
        patch.setenv(client.FORCE_COLD, "1")
        assert how(started(ends)) == ("cold", "")
    asked = []
    monkeypatch.setattr(Job, "start", classmethod(lambda cls, spec, **how: asked.append(how["cold"]) or 1 / 0))
    Lab(cold=True)._launch(Spec("single", nproc=1, device="cpu"))
    for more in ([], ["--cold"]):
        with pytest.raises(ZeroDivisionError):
            act(cli.parse(["run", str(ends), "--nproc", "1", "--device", "cpu", *more]))
    assert asked == [True, False, True]


def test_a_process_that_has_a_gpu_open_is_known(tmp_path, monkeypatch):
    assert not fork.has_gpu_open()
    monkeypatch.setattr(Path, "readlink", lambda path: Path("/dev/nvidiactl"))
    assert fork.has_gpu_open()


def test_the_agent_of_a_warm_run_does_not_look_for_gpus_and_its_ranks_do(tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys, torch\n"
        "from labkit.launch.warm import fork as ranks\n"
        "asked = []\n"
        "torch.cuda.is_available = lambda: asked.append(1) or False\n"
        "handler = type('Handler', (), {name: None for name in ranks._STREAMS})()\n"
        "def agent():\n"
        "    torch.distributed.launcher.api.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)\n"
        "    ranks.SubprocessHandler._popen(handler, [sys.executable, *ranks._PROBE], {})\n"
        "def fork(program, *more, **options):\n"
        "    assert not asked\n"
        "    program()\n"
        "ranks.fork, ranks.torch.distributed.run.main = fork, agent\n"
        "ranks.probe.start = lambda: print(torch.cuda.is_available(), len(asked))\n"
        "ranks._run_agent(None)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, program], env=os.environ | {"PYTHONPATH": str(CLONE)}, capture_output=True)
    assert done.stdout == b"False 1\n", done.stderr.decode()


@pytest.mark.parametrize(
    "code",
    [
        'names = list({"b", "a"})',
        "names = list(set(open(__file__).read().split()))",
        "vocabulary = {word: number for number, word in enumerate(frozenset(text.split()))}",
        "for name in {file.name for file in Path().iterdir()}: print(name)",
        "for name in first.keys() & second.keys(): print(name)",
        "is_training = hash(path) % 10 < 9",
        'seed = "a".__hash__()',
        'import builtins\nseed = builtins.hash("a")',
        "names.sort(key=hash)",
        "def order(names, by=hash):\n    return by(names)",
        "Names = set\nfirst = list(Names(words))",
        "from collections import defaultdict\nusers = defaultdict(set)",
        "words = set.union(*map(set, rows))",
        "most = max(set(votes), key=votes.count)",
        "names = sorted(set(words), key=len)",
        "left = old.keys()\nright = new.keys()\nfor name in left - right: print(name)",
        'import sys\nsys.path.insert(0, "lib")\nimport order',
        'import sys\nsys.path[:0] = ["lib"]\nimport order',
        "exec(open('order.py').read())",
        "seen = set()\nseen.add(name)\nfirst = seen.pop()",
        "def words(text):\n    return set(text.split())",
        "def split(paths):\n    from helper import order\n    return order(paths)",
        "from . import helper",
        "import package.part",
    ],
)
def test_a_script_that_could_depend_on_the_seed_of_hashes_starts_cold(code, tmp_path):
    """With one seed for all ranks, it would hide that ranks disagree."""
    (tmp_path / "package").mkdir()
    for helper in ("helper.py", "package/part.py"):
        (tmp_path / helper).write_text("import train\ndef order(paths):\n    return list(set(paths))\n")
    script = tmp_path / "train.py"
    script.write_text(code)
    assert client.dependence([script], [str(tmp_path)], {})
    assert not client.dependence([script], [str(tmp_path)], {"PYTHONHASHSEED": "0"})


@pytest.mark.parametrize(
    "code",
    [
        'if sys.argv[1] in {"sgd", "adamw"}: pass',
        "words = sorted(set(text.split()))",
        "assert set(state) == set(expected), len(set(state))",
        "sizes = list({1, 2, 3})",
        "def count(names: set[str]) -> frozenset:\n    assert isinstance(names, (set, frozenset))",
        "model.eval()\nmodel = torch.compile(model)\nfor name in state.keys(): print(name, sys.path)",
        "seen: set[str] = set()\nfor name in names:\n    if name not in seen: seen.add(name)\nprint(len(seen))",
        'settings = {"lr": 0.1} | {name: 1 for name in names}',
        "import absent, json",
        "not python",
    ],
)
def test_a_script_in_which_no_order_depends_on_hashes_may_start_warm(code, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(code)
    assert client.dependence([script], [str(tmp_path)], {}) == ""


def test_ranks_that_disagree_about_a_set_do_so_under_the_lab(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text('print(list({str(number) for number in range(30)}) + [hash("a")])\n')
    handle = started(script, nproc=2)
    assert how(handle)[0] == "cold" and "line 1 of train.py" in handle.state.note
    assert handle.logs(0) != handle.logs(1)
