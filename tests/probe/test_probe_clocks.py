"""The clocks of the probe, with a double of CUDA, and on a GPU if there is one."""

from __future__ import annotations

import json
import math
import types

import pytest
import torch
from places import SCRIPTS
from probed import PROBE, Told, launch

from labkit.probe.clocks import CudaClock
from labkit.probe.journal import Journal
from labkit.probe.patches import Patches
from labkit.probe.steps import StepWatch
from labkit.record.writer import PHASES


class Event:
    """An event of a stream that has advanced to `Cuda.now`."""

    def __init__(self, cuda):
        self.cuda, self.moment = cuda, None

    def record(self, stream):
        self.cuda.handed_out += 1
        self.moment = self.cuda.handed_out

    def query(self):
        self.cuda.asked += 1
        return self.moment <= self.cuda.now

    def elapsed_time(self, end):
        assert self.moment <= end.moment <= self.cuda.now, "queried before it was passed, which would raise"
        return float(end.moment - self.moment)


class Cuda:
    def __init__(self):
        self.now = self.handed_out = self.asked = self.made = 0
        self.capturing = False

    def Event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return Event(self)

    def current_stream(self, device):
        return device

    def is_current_stream_capturing(self):
        return self.capturing

    def get_device_name(self, device):
        return "a double"


@pytest.fixture
def on_cuda(tmp_path, request):
    cuda = Cuda()
    watch = StepWatch(Journal(tmp_path, 0))
    patches = Patches(Journal(tmp_path, 0))
    request.addfinalizer(patches.remove)
    watch.optimizers.follow(patches)
    watch.use(CudaClock(torch.device("cuda", 0), cuda))
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        depth = watch.backward_begins(weight.sum() + 1)
        watch.backward_ends(depth)
        watch.optimizer_begins(optimizer)
        watch.optimizer_ends(optimizer)

    return (
        cuda,
        watch,
        step,
        lambda: [event for event in Told(tmp_path).events if event["kind"] in ("step", "probe_error")],
    )


def test_steps_are_written_in_order_once_the_device_has_passed_them(on_cuda):
    cuda, watch, step, written = on_cuda
    for _ in range(3):
        step()
    # queried once per step for the oldest step and its loss, without waiting
    assert written() == [] and cuda.asked == 6
    cuda.now = 6  # by now the first step has passed, and half of the second
    watch.drain()
    assert [event["step"] for event in written()] == [1]
    cuda.now = cuda.handed_out
    watch.drain()
    assert [event["step"] for event in written()] == [1, 2, 3]
    for event in written():
        assert event["loss"] == 1.0
        assert event["seconds"]["step"] == pytest.approx(sum(event["seconds"][phase] for phase in PHASES), abs=1e-6)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_loss_that_diverges_on_a_gpu_is_noticed_if_it_has_arrived_and_never_waited_for(on_cuda, arrives):
    cuda, watch, _, _ = on_cuda
    seen = []
    watch.observations = types.SimpleNamespace(not_finite=lambda step, models: seen.append(step))
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for loss in (1.0, math.inf, math.nan):
        watch.backward_ends(watch.backward_begins(weight.sum() + loss))
        if arrives:
            cuda.now = cuda.handed_out
        watch.optimizer_begins(optimizer)
        watch.optimizer_ends(optimizer)
    assert seen == ([2] if arrives else [])


def test_events_are_used_again(on_cuda):
    cuda, _, step, written = on_cuda
    for _ in range(5):
        step()
        cuda.now = cuda.handed_out
    made = cuda.made
    for _ in range(50):
        step()
        cuda.now = cuda.handed_out
    assert cuda.made == made and len(written()) == 54


def test_a_device_that_hangs_is_not_waited_for_long(on_cuda):
    _, watch, step, written = on_cuda
    step()
    watch.drain(seconds=0.05)
    assert written() == []


def test_a_graph_that_is_captured_is_left_alone(on_cuda):
    cuda, watch, step, written = on_cuda
    step()
    cuda.capturing = True
    handed_out, asked = cuda.handed_out, cuda.asked
    step()
    watch.drain()
    assert (cuda.handed_out, cuda.asked) == (handed_out, asked)
    cuda.capturing, cuda.now = False, cuda.handed_out
    step()
    assert [event["step"] for event in written()] == [1]
    cuda.now = cuda.handed_out
    watch.drain()
    assert [event["step"] for event in written()] == [1, 2]


def test_an_evaluation_takes_no_event_from_a_step_that_is_not_over(on_cuda):
    cuda, watch, step, written = on_cuda
    step()
    watch.leave(watch.data_begins())
    watch._evaluates()  # releases the marks of the evaluation, but not the end of step 1
    for _ in range(3):
        step()
    cuda.now = cuda.handed_out
    watch.drain()
    assert [event["step"] for event in written()] == [1, 2, 3, 4]
    assert all(event["seconds"]["step"] > 0 for event in written())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_watched_without_a_synchronisation(tmp_path):
    done = launch([*PROBE, SCRIPTS / "on_cuda.py"], tmp_path / "run")
    assert done.returncode == 0, done.stderr
    told = Told(tmp_path / "run")
    assert told.of("probe_error") == [] and told.of("device")[-1]["device"] == "cuda:0"
    digests = {seen["digest"] for seen in told.of("saw") if seen["what"] == "input"}
    assert len(digests) == 1 and None not in digests  # every step has the same input
    steps = told.of("step")
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert [step["loss"] for step in steps] == pytest.approx(json.loads(done.stdout), abs=1e-5)
    for step in steps:
        memory, seconds = step["memory"], step["seconds"]
        assert 0 < memory["allocated"] <= memory["peak"] and memory["allocated"] <= memory["reserved"]
        assert 0 < seconds["step"] < 60 and seconds["backward"] > 0
