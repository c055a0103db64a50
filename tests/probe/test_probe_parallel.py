"""The probe on two ranks under torchrun, as the launcher starts them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from conftest import processes_of, started_warm, wait_until, warm_run
from folded import apply
from places import SCRIPTS
from probed import Told

from labkit.analysis.metrics import throughput
from labkit.analysis.summary import summarise
from labkit.figures import CHARTS
from labkit.record.state import RunState


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
    apply(state, {"kind": "spec", "spec": {"script": "parallel.py", "nproc": 2}})
    for told in parallel[1]:
        for event in [*told.of("start"), *told.of("saw", style)]:
            apply(state, event)
        for step in told.of("step", style):
            apply(state, step | {"seconds": {"step": 1.0}})
    assert throughput(state) == pytest.approx(samples)
    chart = CHARTS["throughput"](state).drawn()
    assert chart.points[0][1][-1] == pytest.approx(samples)
    assert state.note == summarise(state).note == note


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
    assert done.state.status.exit_code == 1
    (error,) = Told(done.folder.path, 1).of("error")
    assert (error["type"], error["message"]) == ("ValueError", "sample 11 has no label")
    for text in (error["traceback"], done.logs(1, "stderr")):
        assert "KeyError: 'label'" in text and "raises.py" in text and "labkit/probe/" not in text
    assert "ValueError: sample 11 has no label" in done.folder.launcher_log.read_text()  # torchrun read the error file
    state = RunState()
    for rank in (0, 1):
        for event in Told(done.folder.path, rank).events:
            apply(state, event)
    assert state.failure.rank == 1 and state.exit_code(1) == 1
