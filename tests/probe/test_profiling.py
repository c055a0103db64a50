"""Profiled steps in real runs: those requested, and none if the script uses a profiler itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import started_warm, wait_until, warm_run
from fabricate import FakeRun

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.probe import sampler
from labkit.record import stacks
from labkit.record.clock import SystemMoment
from labkit.runs.handle import Run

OWN = """
import torch
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
for _ in range(WARM):
    step()
with profile(activities=[ProfilerActivity.CPU]) as prof:
    for _ in range(12):
        step()
print("seen", sum(row.key.startswith("aten::addmm") for row in prof.key_averages()))
"""


class Said(NamedTuple):
    """What a command gave back: its exit code, and what it wrote."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys) -> Callable[..., Said]:
    """Runs a command of labkit in this process."""

    def command(*arguments: str) -> Said:
        code = act(cli.parse(arguments))
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return command


def test_a_step_that_is_asked_for_is_captured_by_every_rank(command):
    asked = {"workload": "mlp", "nproc": 2, "device": "cpu", "batch_size": 16, "steps": 40, "samples": 2048}
    job = started_warm("ddp", **asked, fault="slow_rank", sample_every=0)
    wait_until(lambda: job.state.step >= 4, 120)
    told = command("capture", job.name)
    assert told.code == 0, told.stderr
    asked = int(told.stdout.split()[1])
    job.wait(120)
    ranks = job.state.ranks
    assert [sorted(rank.timelines) for rank in ranks.values()] == [[3, asked]] * 2, (
        "an early one, and the one that was asked for"
    )
    assert all(rank.memory_step.step == asked for rank in ranks.values())
    buckets = ["all_reduce"] * 2  # of 1 MiB, and the rest
    assert all([call.op for call in rank.timeline.comm] == buckets for rank in ranks.values())
    assert ranks[0].timeline.comm[0].seq == ranks[1].timeline.comm[0].seq, "the same collective has one number"
    assert ranks[0].timeline.exposed["backward"] > 0.1, "rank 0 waits for the slow one"
    assert job.logs(0, "stderr") == job.logs(1, "stderr") == "", "nobody sees the profiler"
    shown = command("show", job.name)
    assert f"profiled step {asked}" in shown.stdout and "all_reduce" in shown.stdout
    assert "Cause: every collective waits for the slowest rank" in shown.stdout
    written = command("export", job.name, "--to", "perfetto", "--out", str(job.folder.path))
    assert written.code == 0 and "perfetto" in written.stdout
    events = json.loads((job.folder.path / f"{job.name}.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and any(event["name"] == "all_reduce" for event in events)
    assert (
        command("capture", job.name).stderr.strip()
        == f"labkit: run {job.name} is over; only a run in progress can be profiled"
    )


@pytest.mark.parametrize("warm", [1, 2, 7])
def test_a_script_with_a_profiler_of_its_own_has_it_to_itself(tmp_path, warm):
    script = tmp_path / "own.py"
    script.write_text(OWN.replace("WARM", str(warm)))
    job = warm_run(script, nproc=1, device="cpu", sample_every=4)
    assert job.words == "finished", job.logs(0, "stderr")
    assert job.logs(0).strip() == "seen 1"
    assert job.state.unwatched == []
    assert all(step <= warm for step in job.state.ranks[0].timelines), (
        "none from the time when the script's own profiler was there"
    )


def test_a_run_without_a_sampled_step_has_no_trace(runs, command):
    fake = FakeRun(runs)
    fake.start()
    fake.step(3)
    fake.end()
    fake.close()
    told = command("export", fake.folder.name, "--to", "perfetto")
    assert told.code == 1 and "has no profiled step" in told.stderr
    with pytest.raises(LookupError, match="is over"):
        Run.attach(fake.folder.path).capture()


@pytest.mark.parametrize(
    ("readings", "taken"),
    [((0, 9), 1), ((0, 900_000, 900_007, 900_020), 2), (range(0, 9_000_000, 90_000), 1 + sampler._TRIES)],
)
def test_system_time_and_mark_are_of_one_moment(monkeypatch, readings, taken):
    """A process that loses its core between the two readings takes them again, so often that it ends."""
    times, marks, released = iter(readings), iter(range(1, 100)), []
    monkeypatch.setattr(SystemMoment, "now", lambda: SystemMoment(0, next(times)))
    clock = SimpleNamespace(mark=lambda: next(marks), release=released.extend)
    _, mark = sampler.moment(clock)
    assert (mark, released) == (taken, list(range(1, taken)))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not tell what threads do")
def test_a_profile_ends_when_no_other_thread_runs(monkeypatch):
    """A thread that still notes the end of an operation would write into what the profile has freed."""
    looks = []
    busy = {"left": 5}

    def runs(task):
        busy["left"] -= 1
        looks.append(task.name)
        return busy["left"] > 0

    other = threading.Event()
    thread = threading.Thread(target=other.wait)
    thread.start()
    try:
        monkeypatch.setattr(stacks, "_runs", runs)
        stacks.wait_for_other_threads()
        assert busy["left"] <= 1 - stacks._LOOKS, "it looked until all were at rest, and some times more"
        assert str(threading.get_native_id()) not in looks
        monkeypatch.setattr(stacks, "_runs", lambda task: True)
        monkeypatch.setattr(stacks, "_UNREST", 0.05)
        stacks.wait_for_other_threads()  # a thread that never sleeps does not block the run
    finally:
        other.set()
        thread.join()


def test_a_thread_that_has_ended_does_not_run(tmp_path):
    assert not stacks._runs(tmp_path / "gone")
    (tmp_path / "stat").write_text("7 (a) R) R 1 1", encoding="ascii")
    assert stacks._runs(tmp_path)
    (tmp_path / "stat").write_text("7 (R) S 1 1", encoding="ascii")
    assert not stacks._runs(tmp_path)
