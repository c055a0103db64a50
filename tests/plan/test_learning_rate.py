"""The learning rate of each step: warm-up and decay, against torch's schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from labkit import Spec, SpecError
from labkit.plan.script import write_script
from labkit.training.strategies import base

STEPS = 20


def of_torch(warmup: int, decay: str) -> list[float]:
    """The learning rates of torch's schedulers, as fractions of the largest."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    after = {
        "none": lambda: lr_scheduler.ConstantLR(optimizer, 1.0),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS - warmup),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, STEPS - warmup),
    }[decay]()
    scheduler = after
    if warmup:
        rising = lr_scheduler.LambdaLR(optimizer, lambda done: (done + 1) / warmup)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, after], [warmup])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 5, STEPS - 1])
@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_the_learning_rates_are_those_of_torchs_schedulers(warmup, decay, monkeypatch):
    for name, value in (("WARMUP_STEPS", warmup), ("LR_DECAY", decay)):
        monkeypatch.setattr(base, name, value)
    rates = [base.lr_factor(step, STEPS) for step in range(1, STEPS + 1)]
    assert rates == pytest.approx(of_torch(warmup, decay))
    assert max(rates) == 1.0
    assert min(rates) > 0, "no step changes nothing"


def test_a_script_with_a_constant_learning_rate_does_not_mention_another():
    plain = write_script(Spec("ddp", nproc=2, steps=STEPS))
    assert not [word for word in ("lr_factor", "WARMUP_STEPS", "LR_DECAY", "param_groups") if word in plain]
    asked = write_script(Spec("ddp", nproc=2, epochs=2, batch_size=100, samples=1_000, options={"warmup_steps": 3}))
    assert "WARMUP_STEPS = 3 " in asked
    assert "LR_DECAY" not in asked
    assert "EPOCHS * len(loader)" in asked, "also right if the script is started by hand with other ranks"


def test_a_warm_up_without_an_end_is_refused():
    with pytest.raises(SpecError, match="the training has 20; use warmup_steps=19 or less, or more steps") as error:
        Spec("ddp", nproc=2, steps=STEPS, options={"warmup_steps": STEPS})
    assert error.value.field == "options"
    assert Spec("ddp", nproc=2, steps=STEPS, options={"warmup_steps": STEPS - 1}).total_steps == STEPS
