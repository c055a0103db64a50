"""Tables of the time of collectives, made up, and a cache folder for them."""

from __future__ import annotations

import pytest

from labkit.prediction.links import LinkTable, Point
from labkit.setup.machine import Machine

MACHINE = Machine((), cores=4, memory=1 << 34, torch=(2, 13))


def table(ranks: int = 2, backend: str = "gloo", **points: tuple[tuple[int, float], ...]) -> LinkTable:
    rows = {
        operation: tuple(Point(size, seconds, seconds / 2, seconds * 2, 9) for size, seconds in each)
        for operation, each in points.items()
    }
    return LinkTable(MACHINE.hardware, MACHINE.torch_version, backend, ranks, "2026-11-22T20:00:00+00:00", rows, {})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "labkit" / "links"
