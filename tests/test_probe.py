"""The probe around scripts in many styles, alone and under torchrun: what it sees, and that nobody notices it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import torch
from conftest import processes_of, wait_until

from labkit.events import PHASES, Reader
from labkit.probe import hooks
from labkit.probe.clocks import CpuClock, CudaClock
from labkit.probe.journal import Guard, Journal
from labkit.probe.steps import StepWatch
from labkit.state import RunState

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
PROBE = [sys.executable, "-m", "labkit.probe"]


def environment(run: Path | None, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    place = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"LABKIT_RUN_DIR": str(run)} if run else {})
    return inherited | place | more


def launch(argv: list[object], run: Path | None, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(a) for a in argv], env=environment(run, **more), capture_output=True, text=True, timeout=240)


class Told:
    """One rank's events; those of a style are the ones between its name and the next."""

    def __init__(self, run: Path, rank: int = 0):
        reader = Reader(run / "events" / f"rank{rank}.jsonl")
        self.events = list(reader.poll())
        assert reader.broken == 0
        self.styles: dict[str, list[dict]] = defaultdict(list)
        style = ""
        for event in self.events:
            if event["kind"] == "metric" and event["name"] == "style":
                style = event["value"]
            self.styles[style].append(event)

    def of(self, kind: str, style: str | None = None) -> list[dict]:
        return [event for event in (self.events if style is None else self.styles[style]) if event["kind"] == kind]

    def metric(self, name: str, style: str) -> list[object]:
        return [event["value"] for event in self.of("metric", style) if event["name"] == name]

    def owners(self, style: str) -> dict[str, int]:
        return self.of("memory", style)[-1]["owners"]


# ---- one process, many styles


@pytest.fixture(scope="module")
def styles(tmp_path_factory):
    run = tmp_path_factory.mktemp("styles") / "run"
    done = launch([*PROBE, SCRIPTS / "styles.py"], run)
    return done, Told(run)


def test_every_style_runs_to_its_end_unseen(styles):
    done, told = styles
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == len(told.styles) - 1 > 10
    assert "global hooks" not in done.stderr
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
        ("raises_and_goes_on", [8, 16, 16]),
        ("transforms", [16, 8, 8]),  # with the batch that was fetched when the last model raised
        ("compiled", [8] * 3),
        ("two_optimizers", [8] * 4),
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
    losses = [step["loss"] for step in told.of("step", "trainer")]  # and not the gradient scaler's
    assert losses == pytest.approx(told.metric("true_loss", "trainer"))
    assert told.of("step", "lbfgs")[0]["loss"] == pytest.approx(told.metric("first_loss", "lbfgs")[0])  # before the closure's others
    assert told.of("step", "by_hand")[0]["loss"] == 4.0


def test_evaluation_is_told_and_belongs_to_no_step(styles):
    _, told = styles
    names = {style: [event["name"] for event in told.of("activity", style)] for style in told.styles}
    assert names["plain"] == ["training", "evaluating", "training", "evaluating"]
    assert names["accumulation"] == ["training", "evaluating"]  # though its model stays in train mode
    assert names["lbfgs"] == ["training"]
    assert names["range_loop"] == []  # a teacher is no evaluation
    assert names["two_optimizers"] == []  # nor is a critic's look at what is made


def test_bytes_by_owner(styles):
    _, told = styles
    parameters = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    first, second = told.of("memory", "plain")
    held = {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters + 4 * 4, "communication": 0, "other": 0}
    assert first["owners"] == held
    # What the ReLU gave, kept once by two layers, and what the loss keeps: the logarithms, and two numbers.
    kept = 4 * 8 * 16 + 4 * 8 * 3 + 4 + 4
    assert second["owners"] == held | {"activations": kept}
    for step in told.of("step", "plain"):
        assert step["memory"]["allocated"] == sum(first["owners"].values()) and step["memory"]["reserved"] is None
        assert step["memory"]["peak"] >= step["memory"]["allocated"]


def test_metrics_keep_their_names_apart(styles):
    _, told = styles
    assert told.metric("teacher.true_loss", "range_loop") == [1.0]
    assert [event["step"] for event in told.of("metric", "trainer")][1:] == [step["step"] for step in told.of("step", "trainer")]


# ---- two ranks under torchrun, as the launcher starts them


def torchrun(run: Path, *script: object) -> list[object]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-conf", "store_type=file"),
        *(f"--rdzv-endpoint={run / 'rendezvous'}", "--local-addr=127.0.0.1", "--nproc-per-node=2", "-m", "labkit.probe", *script),
    ]


LOCAL = {"LABKIT_LOOPBACK": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def listeners(run: Path) -> set[str]:
    """The addresses that the processes of a run listen on."""
    found = set()
    for process in processes_of(str(run)):
        try:
            found |= {connection.laddr.ip for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    run = tmp_path_factory.mktemp("parallel") / "run"
    run.mkdir()
    log, heard = run / "log", set()
    with log.open("w") as output:
        argv = [str(a) for a in torchrun(run, SCRIPTS / "parallel.py")]
        process = subprocess.Popen(argv, env=environment(run, **LOCAL), stdout=output, stderr=output)

        def look() -> bool:
            heard.update(listeners(run))
            return process.poll() is not None

        wait_until(look, 240)
    assert process.returncode == 0, log.read_text()
    return heard, [Told(run, rank) for rank in (0, 1)]


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
    assert first.owners("fsdp1")["activations"] == first.owners("fsdp2")["activations"] == same  # gathered parameters are none
    stage = 4 * 8 * 64
    sent = 4 * 8 * 16  # what the next stage has been sent is kept until its gradient has come back
    assert stage + sent <= first.owners("gpipe")["activations"] < 1.1 * (stage + sent)  # of all micro-batches
    assert (stage + sent) / 2 <= first.owners("one_f_one_b")["activations"] < stage + sent  # of those in flight


def test_a_rank_that_raises(tmp_path, runs):
    run = runs / "raises"
    run.mkdir(parents=True)
    done = launch(torchrun(run, SCRIPTS / "raises.py"), run, **LOCAL)
    assert done.returncode == 1
    (error,) = Told(run, 1).of("error")
    assert (error["type"], error["message"]) == ("ValueError", "sample 11 has no label")
    for text in (error["traceback"], done.stderr):
        assert "KeyError: 'label'" in text and "raises.py" in text and "labkit/probe/" not in text
    assert "ValueError: sample 11 has no label" in done.stderr.split("Root Cause")[-1]  # torchrun read the error file
    state = RunState()
    for rank in (0, 1):
        for event in Told(run, rank).events:
            state.apply(event)
    assert state.failure["rank"] == 1 and state.exit_code(1) == 1


# ---- as python would


def test_a_script_cannot_tell_the_difference(tmp_path):
    def told_by(*start: object, run: Path | None = None) -> tuple:
        for name in ("left.txt", "left.gz"):
            (tmp_path / name).unlink(missing_ok=True)
        done = launch([*start, SCRIPTS / "identity.py", tmp_path, 3], run)
        return done.returncode, done.stdout, done.stderr, (tmp_path / "left.txt").read_text(), (tmp_path / "left.gz").stat().st_size

    plain = told_by(sys.executable)
    assert plain[0] == 3 and plain[1].splitlines()[1:] == ["thread __main__", "at exit"] and plain[3] == "not yet flushed"
    assert told_by(*PROBE) == plain
    assert told_by(*PROBE, run=tmp_path / "run") == plain
    told = Told(tmp_path / "run")
    assert told.of("end")[0]["exit_code"] == 3 and told.of("error")[0]["type"] == "SystemExit"


ENDS = {
    "raise SystemExit('no data')": (1, "no data\n", "SystemExit"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt", None),
    "def broken(:": (1, "SyntaxError", "SyntaxError"),
    "import ctypes, os\nabort = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda *_: os.abort())\n"
    "ctypes.CDLL(None).on_exit(abort, None)": (0, "", None),  # a library that aborts while the process is torn down
}


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is glibc's")
@pytest.mark.parametrize("source", ENDS)
def test_exit_codes(tmp_path, source):
    code, said, error = ENDS[source]
    script = tmp_path / "a script.py"
    script.write_text(source + "\n")
    done = launch([*PROBE, script], tmp_path / "run")
    assert (done.returncode, "labkit" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr
    told = Told(tmp_path / "run")
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
    """An event of a stream that has come as far as `Cuda.now`."""

    def __init__(self, cuda):
        self.cuda, self.moment = cuda, None

    def record(self, stream):
        self.cuda.handed_out += 1
        self.moment = self.cuda.handed_out

    def query(self):
        self.cuda.asked += 1
        return self.moment <= self.cuda.now

    def elapsed_time(self, end):
        assert self.moment <= end.moment <= self.cuda.now, "asked before it was passed, which would raise"
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
def on_cuda(tmp_path):
    cuda = Cuda()
    watch = StepWatch(Journal(tmp_path, 0))
    watch._use(CudaClock(torch.device("cuda", 0), cuda))
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        depth = watch.backward_begins(weight.sum() + 1)
        watch.leave(depth)
        watch.optimizer_begins(optimizer)
        watch.optimizer_ends(optimizer)

    return cuda, watch, step, lambda: [event for event in Told(tmp_path).events if event["kind"] in ("step", "probe_error")]


def test_steps_are_written_in_order_once_the_device_has_passed_them(on_cuda):
    cuda, watch, step, written = on_cuda
    for _ in range(3):
        step()
    assert written() == [] and cuda.asked == 3  # each step asked once after the oldest, and waited for nothing
    cuda.now = 6  # by now the first step is passed, and half of the second
    watch.drain()
    assert [event["step"] for event in written()] == [1]
    cuda.now = cuda.handed_out
    watch.drain()
    assert [event["step"] for event in written()] == [1, 2, 3]
    for event in written():
        assert event["loss"] == 1.0
        assert event["seconds"]["step"] == pytest.approx(sum(event["seconds"][phase] for phase in PHASES), abs=1e-6)


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
    watch._evaluates()  # gives back what the evaluation had marked, but not the end of step 1
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
        between, told = True, ()

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


def test_a_forked_child_is_silent(tmp_path):
    journal = Journal(tmp_path, 0)
    child = os.fork()
    if child == 0:
        journal.write("step", step=1)
        os._exit(0 if journal.silent else 1)
    assert os.waitpid(child, 0)[1] == 0
    journal.write("end")
    assert [event["kind"] for event in Told(tmp_path).events] == ["end"]


def test_a_full_disk_stops_the_journal_and_nothing_else(tmp_path, monkeypatch):
    journal = Journal(tmp_path, 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal.write("step", step=1)
    assert journal.silent


def test_an_optimizer_that_raised_does_not_shift_the_phases(tmp_path):
    watch = StepWatch(Journal(tmp_path, 0))
    watch._use(CpuClock())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(2):
        watch.optimizer_begins(optimizer)  # raises, and the script tries again
    watch.optimizer_ends(optimizer)
    watch.leave(watch.data_begins())
    watch.optimizer_begins(optimizer)
    watch.optimizer_ends(optimizer)
    steps = Told(tmp_path).of("step")
    assert [step["step"] for step in steps] == [1, 2] and steps[1]["seconds"]["data"] > 0 and steps[1]["seconds"]["other"] > 0
