"""The Python API besides starting and stopping runs: placement of ranks, excerpts of scripts, findings and traffic."""

from __future__ import annotations

import ast
import threading
import time

import pytest
from fabricate import FakeRun

from labkit import Run, Spec, SpecError, excerpt, place, write_script
from labkit.figures.tables import Findings, Ledger
from labkit.setup.machine import Gpu, Machine

DDP = Spec(strategy="ddp", nproc=2, device="cpu")
STEPS = 400


def test_threads_read_the_same_run_at_the_same_time(runs):
    """No event is lost, read twice or seen half, whichever thread asks while the ranks write."""
    fake = FakeRun(runs, steps=STEPS)
    fake.start()
    run, told, errors = Run.attach(fake.folder.path), {}, []

    def read(number: int) -> None:
        try:
            while run.state.step < STEPS:
                run.summary()
            told[number] = [len(rank.steps) for rank in run.state.ranks.values()], run.state.broken
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(STEPS // 10):
        fake.step(10)
        time.sleep(0.005)
    for thread in threads:
        thread.join(120)
    fake.end()
    fake.close()
    assert not errors
    assert told == dict.fromkeys(range(4), ([STEPS, STEPS], 0))


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (4, "cuda")])
def test_ranks_get_gpus_if_there_are_enough(monkeypatch, gpus, device):
    machine = Machine(
        gpus=tuple(Gpu(index, "Tesla T4", 15 << 30, (7, 5)) for index in range(gpus)), cores=4, memory=8 << 30
    )
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: machine))
    assert place(2) == {"nproc": 2, "device": device}


def test_an_excerpt_is_text_of_the_script():
    script = write_script(DDP)
    names = [node.name for node in ast.parse(script).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name in names:
        assert excerpt(DDP, name) in script
    both = excerpt(DDP, "train_step", "BATCH_PER_RANK")
    assert both.startswith("def train_step(") and "\n\nBATCH_PER_RANK = 128" in both


def test_an_excerpt_keeps_decorators():
    text = excerpt(DDP, "evaluate")
    assert text.startswith("@torch.no_grad()\ndef evaluate(")


def test_an_excerpt_of_an_unknown_name():
    with pytest.raises(LookupError, match=r"the script of ddp-x2 defines no 'reshard'; it defines .*train_step"):
        excerpt(DDP, "reshard")
    with pytest.raises(SpecError):
        excerpt(Spec(script="train.py", nproc=2), "main")


def test_findings_and_ledger_have_a_repr(runs):
    fake = FakeRun(runs)
    fake.start()
    run = Run.attach(fake.folder.path)
    assert isinstance(run.findings(), Findings) and isinstance(run.ledger(), Ledger)
    assert repr(Findings()) == "no findings" and "no findings" in Findings()._repr_html_()
    assert "no profiled step yet" in repr(run.ledger()) and "no profiled step yet" in run.ledger()._repr_html_()


def test_waiting_for_a_finding_ends_with_the_run(runs):
    fake = FakeRun(runs)
    fake.start()
    run = Run.attach(fake.folder.path)
    assert run.wait(timeout=0.1, until="hang") is run
