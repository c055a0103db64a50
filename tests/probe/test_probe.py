"""The probe with scripts in many styles on one rank: what it records."""

from __future__ import annotations

import numpy
import pytest
import torch
from folded import apply
from places import SCRIPTS
from probed import watched

from labkit.record.events import Unknown, checked
from labkit.record.state import RunState
from labkit.record.writer import PHASES


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
    assert not any(isinstance(checked(event), Unknown) for event in told.events), "the reader knows every event"
    assert told.of("probe_error") == []
    state = RunState()
    apply(state, {"kind": "status", "status": {"state": "running"}})
    said = []
    for event in told.events:
        apply(state, event)
        said.append(state.words)
    assert said[0] == said[-1] == "starting ranks"
    assert words in said


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
