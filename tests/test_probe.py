"""The probe with scripts in many styles, alone and under torchrun: what it records, and that scripts are not
affected."""

from __future__ import annotations

import errno
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from conftest import processes_of, started_warm, wait_until, warm_run
from probed import PROBE, SCRIPTS, Told, environment, launch, watched

from labkit.analysis.metrics import throughput
from labkit.analysis.summary import summarise
from labkit.figures import CHARTS
from labkit.probe import hooks
from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.journal import Guard, Journal
from labkit.probe.position import Position
from labkit.probe.steps import StepWatch
from labkit.probe.threads import ScriptThread
from labkit.probe.waiting import WaitWatch
from labkit.record import kinds
from labkit.record.events import PHASES, Reader
from labkit.record.state import RunState

# ---- resuming, and what comes before the first step


@pytest.mark.parametrize("done", [0, 3])
def test_a_step_that_creates_optimizer_state_and_batches_that_are_skipped_are_no_steps(done):
    ran, told = watched(SCRIPTS / "resumes.py", done)
    assert ran.logs(0) == "done\n", ran.logs(0, "stderr")
    steps = told.of("step")
    assert [step["step"] for step in steps] == list(range(done + 1, 7))
    assert [step["samples"] for step in steps] == [8] * (6 - done)
    assert told.of("probe_error") == []
    if done:
        (resumed,) = [event["t"] for event in told.of("metric") if event["name"] == "step"]
        assert steps[0]["t"] - steps[0]["seconds"]["step"] >= resumed - 0.005


def test_gradients_are_not_recorded_from_a_step_that_creates_optimizer_state():
    ran, _ = watched(SCRIPTS / "resumes.py", 3, tensors=True)
    assert ran.logs(0) == "done\n", ran.logs(0, "stderr")
    gradients = numpy.load(ran.folder.tensors / "rank0-gradients.npz")
    arrays = [gradients[name] for name in gradients.files if name != "index"]
    assert arrays
    assert all(array.any() for array in arrays), "an optimizer step that only creates state has zero gradients"


def test_the_compilation_of_an_extension_is_an_activity_in_words(tmp_path):
    build = tmp_path / "torch_extensions" / "my_operator"
    build.mkdir(parents=True)
    script = tmp_path / "builds.py"
    script.write_text(
        "import sys, threading\n"
        "from torch.utils.file_baton import FileBaton\n"
        "mine = FileBaton(sys.argv[1])\n"
        "assert mine.try_acquire() is True\n"
        "other = FileBaton(sys.argv[1], wait_seconds=0.01)\n"
        "assert other.try_acquire() is False\n"
        "mine.release()\n"
        "assert mine.try_acquire() is True\n"
        "threading.Timer(0.2, mine.release).start()\n"
        "other.wait()\n"
    )
    ran, told = watched(script, build / "lock")
    assert ran.words == "finished", ran.logs(0, "stderr")
    words = "building the C++ extension my_operator (first use only)"
    assert [event["name"] for event in told.of("activity")][:3] == [words, None, words]
    assert told.of("activity")[-1]["name"] is None
    assert all(kinds.checked(event) for event in told.events), "the reader accepts every event"
    assert told.of("probe_error") == []
    state = RunState()
    state.apply({"kind": "status", "status": {"state": "running"}})
    said = []
    for event in told.events:
        state.apply(event)
        said.append(state.words)
    assert said[0] == said[-1] == "starting ranks"
    assert words in said


def test_a_rank_that_compiles_an_extension_does_not_hang_before_a_quarter_of_an_hour(tmp_path):
    for builds, idle, waits in ((False, 40, True), (True, 40, False), (True, 1000, True)):
        journal = Journal(tmp_path / f"{builds}-{idle}", 0)
        watch = StepWatch(journal)
        if builds:
            watch.build_begins("my_operator")
        watch.progress = time.monotonic() - idle
        WaitWatch(journal, watch, 30)._look()
        kinds = [event["kind"] for event in Reader(tmp_path / f"{builds}-{idle}" / "events" / "rank0.jsonl").poll()]
        assert ("waiting" in kinds) == waits


# ---- one process, many styles


@pytest.fixture(scope="module")
def styles(tmp_path_factory):
    return watched(SCRIPTS / "styles.py", root=tmp_path_factory.mktemp("styles"))


def test_every_style_runs_to_its_end_unseen(styles):
    done, told = styles
    assert done.logs(0, "stderr") == ""
    assert done.words == "finished"
    assert done.logs(0).count("done") == len(told.styles) - 1 > 10
    assert told.of("probe_error") == []
    assert told.events[0]["kind"] == "start" and told.events[0]["torch"] == torch.__version__
    assert told.events[-1]["kind"] == "end" and told.events[-1]["exit_code"] == 0
    assert told.events[-1]["steps"] == len(told.of("step"))


@pytest.mark.parametrize(
    ("style", "samples"),
    [
        ("plain", [8] * 6),
        ("accumulation", [16] * 3),
        ("lbfgs", [16] * 3),
        ("keyword_batches", [5] * 4),
        ("trainer", [8] * 3),
        ("range_loop", [6] * 3),
        ("by_hand", [0] * 2),
        ("checkpointed", [8] * 3),
        ("raises_and_goes_on", [8] * 3),  # a batch whose forward raised does not count
        ("transforms", [8] * 3),
        ("compiled", [8] * 3),
        ("two_optimizers", [8] * 4),
        ("both_before_both", [8] * 3),
        ("one_loss_for_two", [8] * 3),
        ("inside_backward", [8] * 20),
        ("prefetched", [16] * 6),
        ("sequence_first", [8] * 3),
    ],
)
def test_steps_and_samples(styles, style, samples):
    _, told = styles
    assert [step["samples"] for step in told.of("step", style)] == samples


def test_steps_are_numbered_and_phases_add_up(styles):
    _, told = styles
    steps = told.of("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        seconds = step["seconds"]
        assert set(seconds) == {"step", *PHASES} and min(seconds.values()) >= 0
        assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["step"], abs=1e-6)
        assert seconds["backward"] > 0 and seconds["optimizer"] > 0
    assert all(step["seconds"]["data"] > 0 and step["seconds"]["forward"] > 0 for step in told.of("step", "plain"))
    assert all(step["seconds"]["forward"] == 0 for step in told.of("step", "by_hand"))
    assert all(step["seconds"]["data"] == 0 for step in told.of("step", "range_loop")[1:])


def test_the_loss_is_the_scripts_own(styles):
    _, told = styles
    losses = [step["loss"] for step in told.of("step", "trainer")]  # not the scaled loss
    assert losses == pytest.approx(told.metric("true_loss", "trainer"))
    # the closure's first loss
    assert told.of("step", "lbfgs")[0]["loss"] == pytest.approx(told.metric("first_loss", "lbfgs")[0])
    assert told.of("step", "by_hand")[0]["loss"] == 4.0


def test_each_optimizer_has_the_losses_of_its_own_model(styles):
    _, told = styles
    numbers = {event["name"]: event["optimizer"] for event in told.of("optimizer")}
    for style, event, names in (
        ("two_optimizers", "", ("first", "second")),
        ("both_before_both", "both.", ("for_actor", "for_critic")),
    ):
        pace, other = (numbers[name] for name in names)
        steps = told.of("step", style)
        points = [point for event in told.of("losses") if event["optimizer"] == other for point in event["points"]]
        assert [step["loss"] for step in steps] == pytest.approx(told.metric(f"{event or 'two.'}true_loss", style))
        assert [loss for _, loss in points] == pytest.approx(told.metric(f"{event}other_loss", style))
        assert [step for step, _ in points] == [step["step"] for step in steps]
        assert {one["optimizer"]: one["sets_pace"] for one in told.of("optimizer", style)} == {pace: True, other: False}


def test_optimizers_that_share_a_loss_have_one(styles):
    told, style = styles[1], "one_loss_for_two"
    assert {event["optimizer"] for event in told.of("losses")} < {event["optimizer"] for event in told.of("optimizer")}
    assert len(told.of("optimizer")) == 4 and told.of("optimizer", style) == []
    assert [step["loss"] for step in told.of("step", style)] == pytest.approx(told.metric("shared.true_loss", style))


def test_a_step_that_is_made_inside_backward_is_one_step(styles):
    _, told = styles
    steps = told.of("step", "inside_backward")
    assert [step["loss"] for step in steps] == pytest.approx(told.metric("inside.true_loss", "inside_backward"))
    assert all(step["seconds"]["backward"] > 0 and step["seconds"]["optimizer"] > 0 for step in steps)
    assert told.of("optimizer", "inside_backward") == []


def test_evaluation_is_told_and_belongs_to_no_step(styles):
    _, told = styles
    names = {style: [event["name"] for event in told.of("activity", style)] for style in told.styles}
    assert names["plain"] == ["training", "evaluating", "training", "evaluating"]
    assert names["accumulation"] == ["training", "evaluating"]  # though its model stays in train mode
    assert names["lbfgs"] == ["training"]
    assert names["range_loop"] == []  # a teacher model is not an evaluation
    assert names["two_optimizers"] == []  # nor is a critic's forward on generated samples


def test_bytes_by_owner(styles):
    _, told = styles
    parameters = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    first, second = told.of("memory", "plain")
    held = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters + 4 * 4,
        "communication": 0,
        "other": 0,
    }
    assert first["owners"] == held
    # The output of the ReLU, saved once for two layers, and the tensors saved by the loss: log-probabilities, two
    # scalars.
    kept = 4 * 8 * 16 + 4 * 8 * 3 + 4 + 4
    assert second["owners"] == held | {"activations": kept}
    for step in told.of("step", "plain"):
        assert step["memory"]["allocated"] == sum(first["owners"].values()) and step["memory"]["reserved"] is None
        assert step["memory"]["peak"] >= step["memory"]["allocated"]


def test_what_does_not_train_is_counted_too():
    done, told = watched(SCRIPTS / "held.py")
    assert done.words == "finished", done.logs(0, "stderr")
    one = 4 * (64 * 256 + 256 + 2 * 256 + 256 * 10 + 10)
    buffers = 2 * 4 * 256 + 8
    first, last = told.of("memory")[0]["owners"], told.of("memory")[-1]["owners"]
    assert first["parameters"] == last["parameters"] == 3 * one, "the model, its teacher and its average"
    assert last["gradients"] == one and last["optimizer"] == pytest.approx(2 * one, rel=0.01)
    held = 3 * buffers + one + 3 * 4000  # the copy in a dictionary, and tensors in a list
    assert held <= last["other"] < held + 2000, "neither the data set nor a batch, which are freed or on the host"
    (curve,) = told.of("memory_step")
    assert curve["at_peak"]["parameters"] == 3 * one and curve["at_peak"]["other"] >= held
    assert told.of("step")[-1]["memory"]["allocated"] == sum(last.values()) - last["activations"]


def test_metrics_keep_their_names_apart(styles):
    _, told = styles
    assert told.metric("teacher.true_loss", "range_loop") == [1.0]
    assert [event["step"] for event in told.of("metric", "trainer")][1:] == [
        step["step"] for step in told.of("step", "trainer")
    ]


# ---- two ranks under torchrun, as the launcher starts them


def listeners(run: Path) -> set[str]:
    """The addresses on which the processes of a run listen."""
    found = set()
    for process in processes_of(str(run)):
        try:
            found |= {
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    started = started_warm(SCRIPTS / "parallel.py", tmp_path_factory.mktemp("parallel"), nproc=2, device="cpu")
    heard = set()

    def look() -> bool:
        heard.update(listeners(started.folder.path))
        return started.state.over

    wait_until(look, 240)
    assert started.words == "finished", started.logs(0, "stderr")
    return heard, [Told(started.folder.path, rank) for rank in (0, 1)]


def test_nothing_listens_beyond_this_machine(parallel):
    heard, _ = parallel
    assert heard == {"127.0.0.1"}


@pytest.mark.parametrize("rank", [0, 1])
def test_parallel_training_is_seen_whole(parallel, rank):
    told = parallel[1][rank]
    assert told.of("probe_error") == [] and told.events[-1]["exit_code"] == 0
    assert (told.events[0]["rank"], told.events[0]["local_rank"], told.events[0]["world_size"]) == (rank, rank, 2)
    for style in ("ddp", "zero", "fsdp1", "fsdp2", "tensor_parallel", "gpipe", "one_f_one_b"):
        steps = told.of("step", style)
        assert len(steps) == 4, style
        assert {step["samples"] for step in steps[1:]} == {16 if style == "tensor_parallel" else 8}, style
        losses, true = [step["loss"] for step in steps], told.metric("true_loss", style)
        assert losses == (pytest.approx(true) if true else [None] * 4), style
        assert bool(true) == (style not in ("gpipe", "one_f_one_b") or rank == 1), style
        for step in steps:
            assert min(step["seconds"][phase] for phase in ("forward", "backward", "optimizer")) > 0, style


@pytest.mark.parametrize(
    ("style", "samples", "note"),
    [
        ("ddp", 2 * 8, ""),
        ("zero", 2 * 8, ""),
        ("fsdp1", 2 * 8, ""),
        ("fsdp2", 2 * 8, ""),
        (
            "tensor_parallel",
            16,
            (
                "samples/s inferred from the first batches: ranks 0 and 1 read the same samples, so each sample counts"
                " once"
            ),
        ),
        (
            "gpipe",
            8,
            "samples/s inferred from the first batches: rank 1 receives activations, so no samples count there",
        ),
        (
            "one_f_one_b",
            8,
            "samples/s inferred from the first batches: rank 1 receives activations, so no samples count there",
        ),
    ],
)
def test_each_sample_counts_once(parallel, style, samples, note):
    state = RunState()
    state.apply({"kind": "spec", "spec": {"script": "parallel.py", "nproc": 2}})
    for told in parallel[1]:
        for event in [*told.of("start"), *told.of("saw", style)]:
            state.apply(event)
        for step in told.of("step", style):
            state.apply(step | {"seconds": {"step": 1.0}})
    assert throughput(state) == pytest.approx(samples)
    chart = CHARTS["throughput"](state).drawn()
    assert chart.points[0][1][-1] == pytest.approx(samples)
    assert state.note == summarise(state)["note"] == note


def test_shards_are_counted_as_shards(parallel):
    _, (first, second) = parallel
    whole = first.owners("ddp")["parameters"]
    assert whole == 4 * (16 * 64 + 64 + 64 * 16 + 16 + 16 * 4 + 4)
    for style in ("ddp", "zero", "fsdp1", "fsdp2", "tensor_parallel", "gpipe", "one_f_one_b"):
        for told in (first, second):
            owners = told.owners(style)
            assert owners["gradients"] == owners["parameters"] and owners["activations"] > 0, style
    assert first.owners("ddp")["optimizer"] == pytest.approx(2 * whole, rel=0.01)
    assert sum(told.owners("zero")["optimizer"] for told in (first, second)) == pytest.approx(2 * whole, rel=0.01)
    for style in ("fsdp1", "fsdp2", "gpipe"):
        assert sum(told.owners(style)["parameters"] for told in (first, second)) == whole, style
    assert first.owners("tensor_parallel")["parameters"] == whole - 4 * (16 * 64 + 64 + 64 * 16) // 2
    same = first.owners("ddp")["activations"]
    # gathered parameters do not count
    assert first.owners("fsdp1")["activations"] == first.owners("fsdp2")["activations"] == same
    stage = 4 * 8 * 64
    sent = 4 * 8 * 16  # the tensor sent to the next stage stays allocated until its gradient arrives
    assert stage + sent <= first.owners("gpipe")["activations"] < 1.1 * (stage + sent)  # of all micro-batches
    assert (stage + sent) / 2 <= first.owners("one_f_one_b")["activations"] < stage + sent  # of those in flight


def test_a_rank_that_raises():
    done = warm_run(SCRIPTS / "raises.py", nproc=2, device="cpu")
    assert done.state.status["exit_code"] == 1
    (error,) = Told(done.folder.path, 1).of("error")
    assert (error["type"], error["message"]) == ("ValueError", "sample 11 has no label")
    for text in (error["traceback"], done.logs(1, "stderr")):
        assert "KeyError: 'label'" in text and "raises.py" in text and "labkit/probe/" not in text
    assert "ValueError: sample 11 has no label" in done.folder.launcher_log.read_text()  # torchrun read the error file
    state = RunState()
    for rank in (0, 1):
        for event in Told(done.folder.path, rank).events:
            state.apply(event)
    assert state.failure["rank"] == 1 and state.exit_code(1) == 1


# ---- as python would


def test_a_script_cannot_tell_the_difference(tmp_path):
    def told_by(*start: object, run: Path | None = None) -> tuple:
        for name in ("left.txt", "left.gz"):
            (tmp_path / name).unlink(missing_ok=True)
        done = launch([*start, SCRIPTS / "identity.py", tmp_path, 3], run)
        return (
            done.returncode,
            done.stdout,
            done.stderr,
            (tmp_path / "left.txt").read_text(),
            (tmp_path / "left.gz").stat().st_size,
        )

    plain = told_by(sys.executable)
    assert (
        plain[0] == 3 and plain[1].splitlines()[1:] == ["thread __main__", "at exit"] and plain[3] == "not yet flushed"
    )
    assert told_by(*PROBE) == plain
    assert told_by(*PROBE, run=tmp_path / "run") == plain
    told = Told(tmp_path / "run")
    assert told.of("end")[0]["exit_code"] == 3 and told.of("error")[0]["type"] == "SystemExit"


ENDS = {
    "raise SystemExit('no data')": (1, "no data\n", "SystemExit"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt", None),
    "def broken(:": (1, "SyntaxError", "SyntaxError"),
    "import ctypes, os\nabort = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda *_: os.abort())\n"
    "ctypes.CDLL(None).on_exit(abort, None)": (
        0,
        "",
        None,
    ),  # a library that aborts while the process is torn down
}


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is glibc's")
@pytest.mark.parametrize("source", ENDS)
def test_exit_codes(tmp_path, source):
    code, said, error = ENDS[source]
    script = tmp_path / "a script.py"
    script.write_text(source + "\n")
    done, told = watched(script)
    stderr = done.logs(0, "stderr")
    failures = {"0": code} if code else {}
    seen = done.state.status["failures"]
    assert {rank: failure["exit_code"] for rank, failure in seen.items()} == failures, "as torchrun saw it"
    assert "labkit" not in stderr, stderr
    assert said in stderr
    assert [event["type"] for event in told.of("error")] == ([error] if error else [])
    assert told.of("end")[0]["exit_code"] == code


def test_a_script_that_is_not_there(tmp_path):
    done = launch([*PROBE, tmp_path / "none.py"], None)
    assert done.returncode == 2 and "can't open file" in done.stderr and "Traceback" not in done.stderr
    assert "usage" in launch(PROBE, None).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the promise is the kernel's, on Linux")
def test_a_rank_dies_with_its_launcher(tmp_path, runs):
    run = runs / "orphan"
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('waiting', flush=True)\ntime.sleep(120)\n")
    launcher = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(120)"
    argv = [sys.executable, "-c", launcher, *PROBE, str(script)]
    agent = subprocess.Popen(argv, env=environment(run), stdout=subprocess.PIPE)
    agent.stdout.readline()
    assert len(processes_of(str(run))) == 2
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    wait_until(lambda: not processes_of(str(run)), 10)
    agent.stdout.close()


# ---- the clocks, with a double of CUDA


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
def on_cuda(tmp_path, monkeypatch):
    cuda = Cuda()
    watch = StepWatch(Journal(tmp_path, 0))
    # so that monkeypatch restores it
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    watch.optimizers.follow()
    watch._use(CudaClock(torch.device("cuda", 0), cuda))
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


def test_no_frame_is_held_while_the_memory_of_a_step_is_profiled(tmp_path):
    """A stored frame would keep the tensors of a returned function, and free them unseen by the profiler."""
    journal, frames = Journal(tmp_path, 0), []
    watch = StepWatch(journal)
    watch.sampler = types.SimpleNamespace(profiles_memory=False)
    waiting = WaitWatch(journal, watch, 30, types.SimpleNamespace(note=lambda frame, limit: frames.append(frame)))

    def noted() -> bool:
        waiting._note()
        return frames.pop() is not None

    assert noted()
    watch.sampler.profiles_memory = True
    assert not noted()
    watch.progress = time.monotonic() - 31
    assert noted(), "a function that is stuck does not return"


def test_a_rank_without_a_frame_is_alive_where_it_was_last(tmp_path, monkeypatch):
    for name in ("enable", "disable", "dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, getattr(faulthandler, name))  # so that monkeypatch restores them
    position = Position(tmp_path, 0)
    try:
        position.note(sys._getframe(), 30)
        first = json.loads((tmp_path / "stacks" / "rank0.position.json").read_text())
        position.note(None, 30)
        second = json.loads((tmp_path / "stacks" / "rank0.position.json").read_text())
    finally:
        position.end()
    assert "test_a_rank_without_a_frame" in first["stack"] == second["stack"]
    assert second["t"] > first["t"]


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
    steps = told.of("step")
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert [step["loss"] for step in steps] == pytest.approx(json.loads(done.stdout), abs=1e-5)
    for step in steps:
        memory, seconds = step["memory"], step["seconds"]
        assert 0 < memory["allocated"] <= memory["peak"] and memory["allocated"] <= memory["reserved"]
        assert 0 < seconds["step"] < 60 and seconds["backward"] > 0


# ---- what must never happen


def test_a_batch_on_its_way_to_the_gpu_is_copied_between_phases_only(tmp_path, monkeypatch):
    class Watch:
        between, told, thread = True, (), ScriptThread()

        def enter(self, phase):
            self.told = (*self.told, phase)
            return 0

        def leave(self, depth):
            self.told = (*self.told, "over")

    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    watch = Watch()
    hooks._watch_copies(watch, Guard(Journal(tmp_path, 0), "steps"))
    assert torch.ones(2).to("meta").shape == (2,) and watch.told == ()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert torch.ones(2).to("meta").shape == (2,) and watch.told == ("copy", "over")
    watch.between = False
    assert torch.ones(2).to("meta").is_meta and watch.told == ("copy", "over")


def test_a_part_that_fails_is_told_once_and_stays_off(tmp_path):
    guard = Guard(Journal(tmp_path, 0), "steps")

    def fails() -> None:
        raise RuntimeError("a hook's own fault")

    assert guard(fails) is None and guard(fails) is None and guard(lambda: 1) is None
    (event,) = Told(tmp_path).of("probe_error")
    assert (event["part"], event["message"]) == ("steps", "a hook's own fault")


def test_a_thread_with_the_ident_of_one_that_ended_is_not_the_one_that_is_followed():
    """The system reuses thread idents; whether the script's next thread gets one depends on the load."""

    def in_a_thread(look, followed):
        found = []
        thread = threading.Thread(target=lambda: found.append(look(followed)))
        thread.start()
        thread.join()
        return thread.ident, found[0]

    for _ in range(1000):
        thread = ScriptThread()
        assert thread.here()
        first, moved = in_a_thread(lambda followed: (followed.takes_over(), followed.here()), thread)
        second, here = in_a_thread(ScriptThread.here, thread)
        third, looks = in_a_thread(
            lambda followed: (followed.may_move, followed.cpu_seconds(), followed.frame()), thread
        )
        assert moved == (True, True) and not thread.here()
        assert not here and looks[:2] == (True, None)
        assert looks[2].f_code.co_name != "<lambda>", (
            "the main thread's frame, not that of a new thread with the same ident"
        )
        if first == second == third:
            return
    pytest.skip("this system did not give the ident out again")


def test_a_forked_child_is_silent(tmp_path):
    journal = Journal(tmp_path, 0)
    child = os.fork()
    if child == 0:
        journal.write("step", step=1)
        os._exit(0 if journal.silent else 1)
    assert os.waitpid(child, 0)[1] == 0
    journal.write("end")
    assert [event["kind"] for event in Told(tmp_path).events] == ["end"]


@pytest.mark.parametrize(("number", "silent"), [(errno.ENOSPC, False), (errno.EIO, True)])
def test_a_disk_that_is_full_or_broken_disturbs_the_journal_and_nothing_else(number, silent, tmp_path, monkeypatch):
    journal = Journal(tmp_path, 0)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    journal.write("step", step=1)
    assert journal.silent is silent


def test_an_optimizer_that_raised_does_not_shift_the_phases(tmp_path):
    watch = StepWatch(Journal(tmp_path, 0))
    watch._use(CpuClock())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(2):
        watch.optimizer_begins(optimizer)  # raises, and the script retries
    watch.optimizer_ends(optimizer)
    watch.leave(watch.data_begins())
    watch.optimizer_begins(optimizer)
    watch.optimizer_ends(optimizer)
    steps = Told(tmp_path).of("step")
    assert (
        [step["step"] for step in steps] == [1, 2]
        and steps[1]["seconds"]["data"] > 0
        and steps[1]["seconds"]["other"] > 0
    )
