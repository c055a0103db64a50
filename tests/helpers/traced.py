"""Traces of a module's tests, apart from those of others."""

from __future__ import annotations

import pytest

from labkit.prediction import predict as planning
from labkit.prediction.tracer import TRACER


@pytest.fixture(scope="module", autouse=True)
def apart(tmp_path_factory):
    """A cache for this module, and no process that traces after it."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("cache")
        patch.setattr(planning, "user_cache", lambda: place)
        patch.setattr(TRACER, "forked", lambda environment, errors: None)  # whatever a panel has set
        yield
    TRACER.end()
