"""Machines that a Spec is settled on, and the sentence with which it is refused."""

from __future__ import annotations

import pytest

from labkit.plan.spec import Spec, SpecError
from labkit.setup.machine import Gpu, Machine

GIB = 2**30
T4 = (Gpu(0, "Tesla T4", 15 * GIB, (7, 5)), Gpu(1, "Tesla T4", 15 * GIB, (7, 5)))
A100 = (Gpu(0, "NVIDIA A100", 80 * GIB, (8, 0)),)
LAPTOP = Machine(gpus=(), cores=2, memory=8 * GIB)
KAGGLE = Machine(gpus=T4, cores=4, memory=31 * GIB)
SERVER = Machine(gpus=A100, cores=64, memory=512 * GIB)


def refused(field: str, machine: Machine | None = None, **asked) -> str:
    """The sentence of the `SpecError` that a Spec raises."""
    with pytest.raises(SpecError) as caught:
        spec = Spec(**asked)
        if machine is not None:
            spec.on(machine)
    assert caught.value.field == field
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    assert len(sentence) < 300
    return sentence
