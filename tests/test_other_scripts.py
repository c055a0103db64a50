"""Scripts as other people write them, run in the lab as they are: what the lab tells of them is what they say themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from labkit import api
from labkit.events import Reader
from labkit.probe.steps import _weight

OTHERS = Path(__file__).parent / "scripts" / "others"

Printed = list[list[float]]  # the numbers of each line that begins with "loss"


@dataclass(frozen=True)
class Case:
    """A script, what is right to be told of it, and how its losses follow from the numbers that it prints."""

    script: str
    steps: int
    samples: int  # of each step
    parameters: int  # of the whole model, or models
    sharded: bool = False
    optimizer: float = 2.0  # bytes of its state for each byte of parameters
    losses: Callable[[Printed], list[float]] = lambda printed: [loss for (loss,) in printed]


def critics_then_the_generators_before(printed: Printed) -> list[float]:
    """A step ends with the critic's: in it is what the generator did since the critic's last."""
    critic, generator = zip(*printed)
    return [critic[0], *((made + judged) / 2 for made, judged in zip(generator, critic[1:]))]


CASES = (
    Case("trainer_ddp.py", steps=6, samples=16, parameters=21 * 64 + 65, optimizer=1.0),
    Case("range_fsdp2.py", steps=6, samples=12, parameters=3 * (64 + 33 * 128 + 129 * 32) + 33 * 6, sharded=True),
    Case("accumulation.py", steps=5, samples=16, parameters=11 * 32 + 33 * 2),
    Case("gan.py", steps=5, samples=8, parameters=5 * 16 + 17 * 6 + 7 * 16 + 17, losses=critics_then_the_generators_before),
    Case("dataclass_output.py", steps=5, samples=6, parameters=50 * 24 + 25 * 72 + 25 * 24 + 25 * 48 + 49 * 24 + 4 * 24 + 25 * 50),
    Case("traced_pipeline.py", steps=5, samples=32, parameters=13 * 48 + 2 * 49 * 48 + 49 * 3, sharded=True, optimizer=1.0),
)


def test_every_script_of_the_folder_is_run():
    assert {case.script for case in CASES} == {path.name for path in OTHERS.glob("*.py")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_what_the_lab_tells_is_what_the_script_says(case):
    run = api.run(OTHERS / case.script, nproc=2, device="cpu")
    run.wait(180)
    assert run.state.exit_code(0) == 0, run.logs(0, "stderr") + run.logs(1, "stderr")
    told = [list(Reader(run.folder.events_of(rank)).poll(1 << 30)) for rank in (0, 1)]
    owners = []
    for rank, events in enumerate(told):
        assert [event for event in events if event["kind"] in ("probe_error", "error")] == []
        steps = [event for event in events if event["kind"] == "step"]
        assert [step["step"] for step in steps] == list(range(1, case.steps + 1))
        assert [step["samples"] for step in steps] == [case.samples] * case.steps
        assert all(min(step["seconds"][phase] for phase in ("forward", "backward", "optimizer")) > 0 for step in steps)
        printed = [[float(word) for word in line.split()[1:]] for line in run.logs(rank).splitlines() if line.startswith("loss")]
        if printed:
            assert [step["loss"] for step in steps] == pytest.approx(case.losses(printed), rel=1e-6)
        else:
            assert [step["loss"] for step in steps] == [None] * case.steps
        owners.append([event["owners"] for event in events if event["kind"] == "memory"][-1])
    assert "loss" in run.logs(1), "the last rank knows the loss in every style"
    parameters = [owned["parameters"] for owned in owners]
    assert (sum(parameters) if case.sharded else parameters[0]) == 4 * case.parameters
    for owned in owners:
        assert owned["gradients"] == owned["parameters"] and owned["activations"] > 0
        assert owned["optimizer"] == pytest.approx(case.optimizer * owned["parameters"], rel=0.05)


def test_the_share_that_a_script_gave_a_micro_batch():
    loss, other = torch.tensor(3.0, requires_grad=True).exp(), torch.tensor(0.5, requires_grad=True)
    logits, wanted = torch.zeros(4, 2, requires_grad=True), torch.zeros(4, dtype=torch.long)
    for made, share in (
        (loss / 4, 0.25),
        (torch.nn.functional.cross_entropy(logits, wanted) / 4, 0.25),
        (torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / 16, 0.0),
        (loss * (3 / 8), 0.375),
        (0.5 * loss, 0.5),
        (loss / torch.tensor(2), 0.5),
        (loss, 1.0),
        (loss + 1, 1.0),
        (loss / 0, 1.0),
        (loss * 65536, 1.0),
        (loss * other, 1.0),
        (loss * -0.5, 1.0),
        (torch.ones(()), 1.0),
    ):
        assert _weight(made.grad_fn) == pytest.approx(share)
