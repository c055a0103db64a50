"""The badge: equal trainings, the first tensor that differs, and missing data."""

from __future__ import annotations

import json

import numpy
import pytest
from folded import apply

from labkit.analysis.comparison import NotRecorded, assembled, badge, tolerance
from labkit.plan.spec import Spec
from labkit.record.folder import RunFolder
from labkit.record.state import RunState
from labkit.runs.handle import run
from labkit.training.strategies.rules import departures

STEPS = 3
SHAPES = {"0.weight": (4, 6), "0.bias": (4,), "1.weight": (2, 4)}


def tensors(seed: int = 0) -> dict[str, numpy.ndarray]:
    chance = numpy.random.default_rng(seed)
    return {name: chance.normal(size=shape).astype(numpy.float32) for name, shape in SHAPES.items()}


class Recorded:
    """A run as the probe records it, with contents given by the test."""

    def __init__(self, root, strategy="single", nproc=1, losses=(2.0, 1.5, 1.0), **fields):
        self.folder = RunFolder.create(f"{strategy}-x{nproc}", root)
        self.folder.tensors.mkdir()
        self.ranks = nproc
        asked = {"batch_size": 64, "scaling": "strong", "steps": STEPS, "samples": 640, "device": "cpu"} | fields
        spec = Spec(strategy, "mlp", nproc=nproc, **asked).to_json()
        RunFolder.write_json(self.folder.spec, spec)
        self.state = RunState()
        apply(self.state, {"kind": "spec", "spec": spec})
        for rank in range(nproc):
            apply(self.state, {"kind": "start", "t": 0.0, "rank": rank, "attempt": 0})
            for step, loss in enumerate(losses, 1):
                apply(self.state, {"kind": "step", "t": float(step), "rank": rank, "step": step, "loss": loss})

    def write(self, rank, what, pieces):
        """Pieces are (fields of the index, array)."""
        arrays = {f"a{number}": array for number, (_, array) in enumerate(pieces)}
        index = [{"key": f"a{number}"} | fields for number, (fields, _) in enumerate(pieces)]
        text = numpy.frombuffer(json.dumps(index).encode(), dtype=numpy.uint8)
        numpy.savez(self.folder.tensors / f"rank{rank}-{what}.npz", index=text, **arrays)

    def whole(self, gradients=None, parameters=None):
        for rank in range(self.ranks):
            for what, values in (("gradients", gradients or tensors()), ("parameters", parameters or tensors(1))):
                self.write(rank, what, [(block(name, array), array) for name, array in values.items()])
        return self

    def against(self, other):
        return badge(self.folder, self.state, other.folder, other.state)


def block(name, array, offset=None, shape=None, kind="block"):
    return {"name": name, "shape": list(shape or array.shape), "kind": kind, "offset": list(offset or [0] * array.ndim)}


@pytest.fixture
def single(runs):
    return Recorded(runs).whole()


def test_the_same_figures_are_equal_and_name_their_tolerance(runs, single):
    found = Recorded(runs, "ddp", 2).whole().against(single)
    assert found.verdict == "equal"
    assert [one.what for one in found.deviations] == ["loss", "gradients", "parameters"]
    assert "Equal up to fp32 rounding" in found.sentence
    assert json.loads(json.dumps(found.to_json()))["verdict"] == "equal"


def test_rounding_is_allowed_and_more_is_not(runs, single):
    for factor, verdict in ((1 + 3e-6, "equal"), (1 + 1e-3, "differs")):
        off = tensors()
        off["0.bias"] = off["0.bias"] * factor
        found = Recorded(runs, "ddp", 2).whole(gradients=off).against(single)
        assert found.verdict == verdict
    assert "first at gradients of 0.bias" in found.sentence


def test_the_first_tensor_in_the_models_order_is_named(runs, single):
    off = tensors()
    off["0.bias"], off["1.weight"] = off["0.bias"] * 1.001, off["1.weight"] * 2
    found = Recorded(runs, "ddp", 2).whole(gradients=off).against(single)
    assert found.deviations[1].where == "0.bias"


def test_a_gradient_that_is_nothing_but_rounding_is_not_taken_at_its_word(runs):
    tiny, other = tensors(), tensors()
    tiny["0.bias"], other["0.bias"] = tiny["0.bias"] * 1e-9, other["0.bias"] * -1e-9
    assert (
        Recorded(runs, "ddp", 2).whole(gradients=other).against(Recorded(runs).whole(gradients=tiny)).verdict == "equal"
    )


def test_a_loss_that_leaves_is_named_by_its_step(runs, single):
    found = Recorded(runs, "ddp", 2, losses=(2.0, 1.51, 1.0)).whole().against(single)
    assert (found.verdict, found.deviations[0].where) == ("differs", "step 2")
    assert "first at step 2" in found.sentence


def test_what_is_not_a_number_is_no_match(runs, single):
    off = tensors()
    off["1.weight"] = off["1.weight"] * numpy.nan
    found = Recorded(runs, "ddp", 2).whole(gradients=off).against(single)
    assert found.verdict == "differs"
    assert found.to_json()["deviations"][1]["apart"] is None
    assert Recorded(runs, "ddp", 2, losses=(2.0, float("nan"), 1.0)).whole().against(single).verdict == "differs"


def test_replicas_that_have_parted_are_no_match(runs, single):
    parted = Recorded(runs, "ddp", 2).whole()
    values = tensors(1) | {"0.bias": tensors(2)["0.bias"]}
    parted.write(0, "parameters", [(block(name, array), array) for name, array in values.items()])
    found = parted.against(single)
    assert (found.verdict, found.deviations[2].where) == ("differs", "0.bias")


def test_a_reason_makes_a_difference_right(runs, single):
    off = {name: array * 1.001 for name, array in tensors().items()}
    found = Recorded(runs, "ddp", 2, options={"compression": "fp16"}).whole(gradients=off).against(single)
    assert found.verdict == "differs as expected"
    assert found.sentence.startswith("compression=fp16: gradients are rounded to 16 bits")


def test_pieces_of_all_kinds_are_put_together(runs, single):
    shards = Recorded(runs, "fsdp2", 2)
    for what, values in (("gradients", tensors()), ("parameters", tensors(1))):
        weight, bias, last = values.values()
        first = [(block("0.weight", weight[:2], (0, 0), (4, 6)), weight[:2])]
        second = [(block("0.weight", weight[2:], (2, 0), (4, 6)), weight[2:])]
        first.append(({"name": "0.bias", "shape": [4], "kind": "flat", "start": 0}, bias[:3]))
        second.append(({"name": "0.bias", "shape": [4], "kind": "flat", "start": 3}, bias[3:]))
        for pieces in (first, second):
            pieces.append((block("1.weight", last, kind="partial"), last / 2))
        shards.write(0, what, first)
        shards.write(1, what, second)
    assert shards.against(single).verdict == "equal"


def test_a_hole_a_missing_rank_and_a_cut_file_are_said(runs, single):
    whole = tensors()
    holes = Recorded(runs, "fsdp2", 1)
    half = whole["0.weight"][:2]
    holes.write(0, "gradients", [(block("0.weight", half, (0, 0), (4, 6)), half)])
    with pytest.raises(NotRecorded, match=r"all of the gradients of 0\.weight"):
        assembled(holes.folder, "gradients")
    absent = Recorded(runs, "ddp", 2).whole()
    (absent.folder.tensors / "rank1-gradients.npz").unlink()
    assert "only 1 of 2 ranks" in absent.against(single).sentence
    cut = Recorded(runs, "ddp", 2).whole()
    path = cut.folder.tensors / "rank0-parameters.npz"
    path.write_bytes(path.read_bytes()[:100])
    found = cut.against(single)
    assert found.verdict == "not compared"
    assert "parameters cannot be read from rank0-parameters.npz" in found.sentence
    other = Recorded(runs, "ddp", 2).whole(gradients={"0.weight": whole["0.weight"]})
    assert "only one of the two runs has gradients of 0.bias" in other.against(single).sentence


def test_files_and_runs_that_make_no_sense_are_not_compared(runs, single):
    for name, broken in (("empty", b""), ("no zip", b"text")):
        run = Recorded(runs, "ddp", 2).whole()
        (run.folder.tensors / "rank0-gradients.npz").write_bytes(broken)
        assert run.against(single).verdict == "not compared", name
    run = Recorded(runs, "ddp", 2).whole()
    numpy.savez(run.folder.tensors / "rank1-gradients.npz", index=numpy.frombuffer(b'["a"]', dtype=numpy.uint8))
    assert "cannot be read from rank1-gradients.npz" in run.against(single).sentence
    assert badge(run.folder, RunState(), single.folder, single.state).verdict == "not compared"
    own = RunState()
    apply(own, {"kind": "spec", "spec": Spec(script="train.py", nproc=2).to_json()})
    assert "the run is not of a strategy" in badge(run.folder, own, single.folder, single.state).sentence


def test_what_an_engine_keeps_to_itself_is_left_out_and_said(runs, single):
    run = Recorded(runs, "deepspeed", 2).whole()
    for rank in range(2):
        run.write(rank, "gradients", [])
    found = run.against(single)
    assert (found.verdict, [one.what for one in found.deviations]) == ("equal", ["loss", "parameters"])
    assert found.sentence.endswith("DeepSpeed does not expose its gradients.")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seed": 1}, "seed is 1, but 0 in the reference run"),
        ({"batch_size": 32}, "global batch is 32, but 64"),
        ({"samples": 1280}, "train samples is 1280, but 640"),
        ({"options": {"clip_norm": 1.0}}, "clip norm is 1.0, but 0.0"),
        ({"options": {"lr_decay": "cosine"}}, "lr decay is cosine, but none"),
    ],
)
def test_another_training_is_not_compared(runs, single, fields, told):
    found = Recorded(runs, "ddp", 2, **fields).whole().against(single)
    assert found.verdict == "not compared"
    assert told in found.sentence


def test_tolerances_grow_with_steps_and_with_the_rounding():
    fp32, bf16 = Spec("single", "mlp"), Spec("single", "mlp", precision="bf16")
    assert tolerance("gradients", 1, fp32, fp32) == pytest.approx(300 * 2**-24)
    assert tolerance("gradients", 1, bf16, fp32) == pytest.approx(10 * 2**-8)
    for what, most in (("loss", 0.05), ("parameters", 0.3)):
        steps = [tolerance(what, step, fp32, fp32) for step in (1, 2, 10, 11, 10_000)]
        assert steps == sorted(steps)
        assert steps[0] == pytest.approx(300 * 2**-24)
        assert steps[3] == 2 * steps[2]
        assert steps[-1] == most


def test_a_flipped_relu_is_rounding_and_a_wrong_gradient_is_not(runs):
    single = Recorded(runs).whole()
    for factor, verdict in ((1 + 2e-3, "equal"), (1 + 2e-2, "differs")):
        off = {name: tensor * factor for name, tensor in tensors(1).items()}
        assert Recorded(runs, "ddp", 2).whole(parameters=off).against(single).verdict == verdict


def test_why_a_strategy_may_differ():
    assert departures(Spec("ddp", "mlp", nproc=2)) == ()
    (norm,) = departures(Spec("ddp", "resnet18", nproc=2, batch_size=64, scaling="strong"))
    assert "batch norm averages over 32 samples at a time" in norm
    (norm,) = departures(Spec("pp", "resnet18", nproc=2))
    assert "batch norm averages over 16 samples at a time" in norm
    (repeats,) = departures(Spec("ddp", "mlp", nproc=4, samples=110, epochs=1))
    assert "so the sampler repeats 2 of them" in repeats
    assert departures(Spec("ddp", "mlp", nproc=4, samples=110, batch_size=4, steps=2)) == (), (
        "the end of the epoch is not reached"
    )
    (join,) = departures(Spec("ddp", "mlp", nproc=2, samples=97, options={"join": True}))
    assert join.startswith("join: in the last step of an epoch, ranks with fewer samples")


def test_real_runs_get_their_badges():
    asked = {
        "workload": "mlp",
        "device": "cpu",
        "batch_size": 32,
        "scaling": "strong",
        "steps": 4,
        "samples": 110,
        "tensors": True,
    }
    single = run("single", **asked).wait(120)
    ddp, compressed = (
        run("ddp", nproc=2, options=options, **asked).wait(120) for options in ({}, {"compression": "fp16"})
    )
    found = badge(ddp.folder, ddp.state, single.folder, single.state)
    assert found.verdict == "equal", found.sentence
    assert badge(compressed.folder, compressed.state, single.folder, single.state).verdict == "differs as expected"
