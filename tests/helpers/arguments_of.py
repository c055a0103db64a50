"""Checks of what an invalid argument does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from labkit import (
    Lab,
    Spec,
    SpecError,
    compare,
    run,
)
from labkit.common.arguments import shown
from labkit.setup.machine import Machine

DOCUMENTED = (SpecError, ValueError, TypeError, LookupError)

HUGE = 10**5000

DDP = Spec("ddp", nproc=2, device="cpu")

SMALL = Machine(gpus=(), cores=2, memory=8 << 30)


class Rude:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


NUMBERS = (0, -1, 1.5, math.nan, math.inf, -math.inf, 1e400, 10**20, HUGE, "2", "", True, None, [], Rude())

TEXTS = ("", "typo", "x" * 5000, "a\nb", "\0", 5, b"ddp", ["ddp"], {}, None, Rude())

FLAGS = ("yes", 1, 0, None, [], Rude())

PATHS = ("", "\0", b"x", 5, [], Rude())


def refused(call: Callable[[], Any], value: Any = ...) -> str:
    """The sentence with which a call is refused within 5 s; it quotes `value`."""
    began = time.monotonic()
    with pytest.raises(DOCUMENTED) as caught:
        call()
    assert time.monotonic() - began < 5
    sentence = str(caught.value.args[0])
    assert sentence and "\n" not in sentence and not sentence.endswith("."), sentence
    assert len(sentence) < 700, sentence
    if value is not ...:
        assert shown(value) in sentence or str(value) in sentence, sentence
    return sentence


STARTING = {
    "Spec": lambda **fields: Spec(**fields),
    "run": lambda **fields: run(DDP, **fields),
    "compare": lambda **fields: compare(["ddp"], **fields),
    "Lab": lambda **fields: Lab(**fields),
}
