"""Training that no optimizer hook reports: hand-written updates, compiled steps, threads; and findings about unseen
training.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from diagnosed import end, first, fold, names, saw, script, start, status, steps
from places import SCRIPTS
from probed import Told, launch, watched

from labkit.probe.journal import Journal
from labkit.probe.steps import StepWatch

# ---- updates by hand


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    done, told = watched(SCRIPTS / "by_hand.py", root=tmp_path_factory.mktemp("by_hand"))
    assert (done.words, done.logs(0, "stderr")) == ("finished", "")
    return told


def test_an_update_by_hand_ends_a_step(by_hand):
    assert by_hand.of("probe_error") == []
    losses = [event["value"] for event in by_hand.of("metric") if event["name"] == "true_loss"]
    assert len(losses) == 3 + 3 + 4 + 4
    assert [step["loss"] for step in by_hand.of("step")] == pytest.approx(losses, rel=1e-6)
    assert [step["samples"] for step in by_hand.of("step")] == [8] * 3 + [16] * 3 + [0] * 8


def test_what_follows_backward_is_the_optimizer(by_hand):
    for step in by_hand.of("step")[:6]:
        assert min(step["seconds"][phase] for phase in ("data", "forward", "backward", "optimizer")) > 0
    assert [event["name"] for event in by_hand.of("activity")] == ["training", "evaluating", "training"]


# ---- compiled steps


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    bare = launch([sys.executable, SCRIPTS / "compiled.py", "eager"], None)
    return bare, *watched(SCRIPTS / "compiled.py", "eager", root=tmp_path_factory.mktemp("compiled"))


def test_the_probe_is_not_compiled(compiled):
    bare, probed, told = compiled
    assert told.of("probe_error") == []
    assert (bare.returncode, probed.words) == (0, "finished"), probed.logs(0, "stderr")
    assert probed.logs(0) == bare.stdout, "losses, graphs, recompiles and graph breaks"
    assert [json.loads(line)["unique_graphs"] for line in bare.stdout.splitlines() if "{" in line] == [1, 2, 1]
    assert _without_times(probed.logs(0, "stderr")) == _without_times(bare.stderr)


def _without_times(text: str) -> str:
    """Removes the prefix of Dynamo's log lines: level, date, time and process."""
    return re.sub(r"^([VDIWE])\d{4} \S+ \d+ \S*?(torch/)", r"\1 \2", text, flags=re.MULTILINE)


def test_compiled_steps_are_counted(compiled):
    bare, _, told = compiled
    losses = [float(line.split()[1]) for line in bare.stdout.splitlines() if "{" not in line]
    assert [step["loss"] for step in told.of("step")] == pytest.approx(losses, rel=1e-6) and len(losses) == 18
    assert [step["samples"] for step in told.of("step")] == [8] * 18


# ---- threads


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    done, told = watched(SCRIPTS / "threads.py", root=tmp_path_factory.mktemp("threads"))
    assert (done.words, done.logs(0, "stderr")) == ("finished", "")
    return done.logs(0), told


def test_a_loop_in_a_thread_has_steps(threads):
    printed, told = threads
    losses = [float(line.split()[1]) for line in printed.splitlines() if not line.startswith("beside")]
    assert told.of("probe_error") == []
    assert [step["loss"] for step in told.of("step")] == pytest.approx(losses, rel=1e-6)
    assert [step["samples"] for step in told.of("step")] == [4] * 3 + [6] * 3 + [8] * 2
    assert told.of("replica") == []


def test_a_thread_that_trains_beside_is_named(threads):
    _, told = threads
    finding = first(fold(script(1), told.events, status("finished")), "trains_beside")
    assert finding.kind == "unseen" and "beside" in finding.evidence and finding.ranks == (0,)


# ---- elsewhere


def test_processes_that_a_script_starts_are_named():
    done, told = watched(SCRIPTS / "spawns.py")
    assert done.words == "finished" and done.logs(0).count("is done") == 2, done.logs(0, "stderr")
    assert told.of("probe_error") == told.of("step") == []
    finding = first(fold(script(1), told.events, status("finished")), "trains_elsewhere")
    assert "2 processes" in finding.title and "__main__.train (spawn)" in finding.evidence and "torchrun" in finding.fix


def test_workers_of_a_loader_are_not_the_scripts_processes(tmp_path):
    source = (
        "import multiprocessing, subprocess, sys, torch\n"
        "from torch.utils.data import DataLoader\n"
        "if __name__ == '__main__':\n"
        "    list(DataLoader(torch.zeros(4, 1), num_workers=1))\n"
        "    multiprocessing.Process(target=print, args=('a child',)).start()\n"
        "    subprocess.run([sys.executable, '-c', 'print(1)'])\n"
        "    subprocess.run(['true'])\n"
    )
    (tmp_path / "loads.py").write_text(source)
    done, told = watched(tmp_path / "loads.py")
    assert done.words == "finished", done.logs(0, "stderr")
    started = [(event["how"], event["target"]) for event in told.of("saw") if event["what"] == "process"]
    assert [how for how, _ in started] == ["fork", "subprocess"] and started[0][1] == "builtins.print"


def test_gradients_without_an_update_are_said(tmp_path):
    source = (
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "for _ in range(5):\n"
        "    model.zero_grad()\n"
        "    model(torch.ones(3, 2)).sum().backward()\n"
    )
    (tmp_path / "gradients.py").write_text(source)
    done, told = watched(tmp_path / "gradients.py")
    assert (done.words, done.logs(0, "stderr")) == ("finished", "")
    finding = first(fold(script(1), told.events, status("finished")), "trains_elsewhere")
    assert "no parameter changed" in finding.title and "calls of backward: 5" in finding.evidence


def test_processes_are_no_finding_where_the_rank_trains_itself():
    helper = saw(0, "process", how="fork", target="data.prepare")
    assert names(fold(script(1), start(0), helper, steps(0), end(0), status("finished"))) == []
    assert names(fold(script(1), start(0), helper, status("running"))) == []  # it may still start to train
    late = {"kind": "system", "t": 60.0, "cpu_percent": 1.0, "memory_used": 1}
    assert names(fold(script(1), start(0), helper, late, status("running"))) == ["trains_elsewhere"]
    assert names(fold(script(1), start(0), end(0), status("finished"))) == []  # a script that trains nothing


# ---- optimizers inside backward, in threads of autograd's as on a GPU


def test_optimizers_that_step_in_autograds_threads_make_one_step(tmp_path):
    watch = StepWatch(Journal(tmp_path, 0))
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for _ in range(2):
        depth = watch.backward_begins(sum(weight.sum() for weight in weights) + 1)
        for optimizer in optimizers:
            assert watch.steps_inside_backward(optimizer)
        watch.backward_ends(depth)
    assert not watch.steps_inside_backward(optimizers[0]), "backward does not run"
    assert [(step["step"], step["loss"]) for step in Told(tmp_path).of("step")] == [(1, 1.0), (2, 1.0)]
