"""Scripts as other people write them, run in the lab as they are: what the lab tells of them is what they say
themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from folded import events_in
from places import SCRIPTS

from labkit.probe.optimizers import Loss, LossWatch, Optimizers, edge_of, share_of
from labkit.runs import handle

OTHERS = SCRIPTS / "others"

Printed = list[list[float]]  # the numbers of each line that begins with "loss"


@dataclass(frozen=True)
class Case:
    """A script, and what is right to be shown of it; the losses are the numbers that it prints."""

    script: str
    steps: int
    samples: int  # of each step
    parameters: int  # of the whole model, or models
    sharded: bool = False  # each rank trains a part of the model
    whole: bool = False  # each rank holds all of the model nevertheless
    optimizer: float = 2.0  # bytes of its state for each byte of parameters
    names: tuple[str, ...] = ("",)  # of the optimizers, in the order in which the script prints their losses


CASES = (
    Case("trainer_ddp.py", steps=6, samples=16, parameters=21 * 64 + 65, optimizer=1.0),
    Case("range_fsdp2.py", steps=6, samples=12, parameters=3 * (64 + 33 * 128 + 129 * 32) + 33 * 6, sharded=True),
    Case("accumulation.py", steps=5, samples=16, parameters=11 * 32 + 33 * 2),
    Case("gan.py", steps=5, samples=8, parameters=5 * 16 + 17 * 6 + 7 * 16 + 17, names=("optD", "optG")),
    Case(
        "dataclass_output.py",
        steps=5,
        samples=6,
        parameters=50 * 24 + 25 * 72 + 25 * 24 + 25 * 48 + 49 * 24 + 4 * 24 + 25 * 50,
    ),
    # What torch traced refers to all stages, on every rank.
    Case(
        "traced_pipeline.py",
        steps=5,
        samples=32,
        parameters=13 * 48 + 2 * 49 * 48 + 49 * 3,
        sharded=True,
        whole=True,
        optimizer=1.0,
    ),
)


def test_every_script_of_the_folder_is_run():
    assert {case.script for case in CASES} == {path.name for path in OTHERS.glob("*.py")}


def losses_of_optimizers(events: list[dict]) -> dict[str, dict[int, float]]:
    """The losses by the name of their optimizer and by step; one that is the only one has no name."""
    named = {event["optimizer"]: event["name"] for event in events if event["kind"] == "optimizer"}
    pacemaker = next((event["name"] for event in events if event["kind"] == "optimizer" and event["sets_pace"]), "")
    found = {pacemaker: {event["step"]: event["loss"] for event in events if event["kind"] == "step"}}
    for event in events:
        if event["kind"] == "losses":
            found.setdefault(named[event["optimizer"]], {}).update(dict(event["points"]))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_what_the_lab_tells_is_what_the_script_says(case):
    run = handle.run(OTHERS / case.script, nproc=2, device="cpu")
    run.wait(180)
    assert run.state.exit_code(0) == 0, run.logs(0, "stderr") + run.logs(1, "stderr")
    told = [events_in(run.folder.events_of(rank)) for rank in (0, 1)]
    owners = []
    for rank, events in enumerate(told):
        assert [event for event in events if event["kind"] in ("probe_error", "error")] == []
        steps = [event for event in events if event["kind"] == "step"]
        assert [step["step"] for step in steps] == list(range(1, case.steps + 1))
        assert [step["samples"] for step in steps] == [case.samples] * case.steps
        assert all(min(step["seconds"][phase] for phase in ("forward", "backward", "optimizer")) > 0 for step in steps)
        printed = [
            [float(word) for word in line.split()[1:]]
            for line in run.logs(rank).splitlines()
            if line.startswith("loss")
        ]
        series = losses_of_optimizers(events)
        assert set(series) == set(case.names)
        for name, losses in zip(case.names, zip(*printed) if printed else [[None] * case.steps]):
            assert list(series[name]) == list(range(1, case.steps + 1)), "each optimizer's loss stands at its own step"
            assert list(series[name].values()) == (pytest.approx(losses, rel=1e-6) if printed else losses)
        owners.append([event["owners"] for event in events if event["kind"] == "memory"][-1])
    assert "loss" in run.logs(1), "the last rank knows the loss in every style"
    trained = [owned["gradients"] for owned in owners]
    assert (sum(trained) if case.sharded else trained[0]) == 4 * case.parameters
    for owned in owners:
        assert (
            owned["parameters"] == (4 * case.parameters if case.whole else owned["gradients"])
            and owned["activations"] > 0
        )
        assert owned["optimizer"] == pytest.approx(case.optimizer * owned["gradients"], rel=0.05)


def test_the_share_that_a_script_gave_a_micro_batch():
    loss, other = torch.tensor(3.0, requires_grad=True).exp(), torch.tensor(0.5, requires_grad=True)
    logits, wanted = torch.zeros(4, 2, requires_grad=True), torch.zeros(4, dtype=torch.long)
    summed = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    for made, parts in (
        (loss / 4, (0.25,)),
        (torch.nn.functional.cross_entropy(logits, wanted) / 4, (0.25,)),
        (loss * (3 / 8), (0.375,)),
        (0.5 * loss, (0.5,)),
        (torch.tensor(0.5) * loss, (0.5,)),
        (loss / torch.tensor(2), (0.5,)),
        ((loss / 4).clone().float() * 1.0, (0.25,)),
        (0.5 * loss / 4, (0.25, 0.125)),
        (loss, ()),
        (loss + 1, ()),
        (loss / 0, ()),
        (loss * 65536, ()),
        (loss * other, ()),
        (loss * -0.5, ()),
        (1 / loss, ()),
        (torch.ones(()), ()),
    ):
        assert share_of(edge_of(made)).parts == pytest.approx(parts)
        assert not share_of(edge_of(made)).summed
    assert share_of(edge_of(summed / 16)).summed and share_of(edge_of(summed / 16 * 2)).summed
    assert not share_of(edge_of(summed)).summed


def test_the_loss_of_several_micro_batches():
    watch = LossWatch(Optimizers(), lambda kind, **fields: None)

    def shown(*made: torch.Tensor) -> float:
        losses = [Loss(None, share_of(edge_of(one))) for one in made]
        return watch.value(losses, [one.item() for one in made])

    two, four = (torch.tensor(value, requires_grad=True) * 1.0 for value in (2.0, 4.0))
    assert shown(two, four) == 3.0  # as they are: the mean
    assert shown(two / 4) == 0.5  # one alone is shown as it is
    assert shown(two / 2, four / 2) == 3.0  # parts of one mean
    assert shown(two / 2) == 2.0  # an epoch's last step, with fewer micro-batches than the script divides by
    assert shown(two * (1 / 4), four * (3 / 4)) == 3.5  # weighted
    assert shown(0.1 * two, 0.1 * four) == pytest.approx(0.3)  # a factor of the loss itself


def test_an_optimizer_that_is_made_anew_keeps_its_number():
    written = []
    watch = LossWatch(Optimizers(), lambda kind, **fields: written.append((fields["optimizer"], fields["name"])))
    weight = torch.zeros(1, requires_grad=True)
    for _ in range(3):
        for_critic = torch.optim.SGD([weight], lr=0.1)
        assert watch.number(for_critic, False) == 0
        del for_critic
    for_critic = also = torch.optim.SGD([weight], lr=0.1)
    assert watch.number(also, False) == 0
    for_critic = torch.optim.SGD([weight], lr=0.1)
    assert watch.number(for_critic, False) == 1
    assert written == [(0, "for_critic"), (1, "for_critic 2")]
