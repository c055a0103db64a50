"""Runs that never begin, which leave nothing behind."""

from __future__ import annotations

import pytest
from msgspec import structs

from labkit.launch import local
from labkit.launch.job import Job, LaunchError
from labkit.plan.spec import SpecError
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run, run


def test_bad_input_leaves_nothing_behind(runs, tmp_path):
    with pytest.raises(SpecError, match=r"has no script 'missing.py'") as raised:
        run("missing.py", nproc=2)
    assert raised.value.field == "script"
    with pytest.raises(SpecError, match=r"strategy must be one of .*, got 'ddpp'"):
        run("ddpp")
    with pytest.raises(SpecError, match="--nproc 10000 exceeds the maximum of"):
        run("ddp", nproc=10_000)
    assert not runs.exists()


@pytest.mark.parametrize("argv", [["/no/such/python"], []])
def test_a_start_that_fails_leaves_nothing_behind(argv, script, runs, monkeypatch):
    plan = local.plan
    monkeypatch.setattr(local, "plan", lambda *given, **options: structs.replace(plan(*given, **options), argv=argv))
    with pytest.raises(LaunchError, match="the run could not be started"):
        run(script(""), nproc=1, device="cpu")
    assert list(runs.iterdir()) == []


def test_a_folder_that_is_no_run_cannot_be_attached(tmp_path):
    with pytest.raises(LookupError, match="not a run folder"):
        Job.attach(RunFolder(tmp_path))
    with pytest.raises(LookupError, match="there is no run"):
        Run.attach("yesterday")
