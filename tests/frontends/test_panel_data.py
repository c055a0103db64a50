"""The panel while data are looked for, and when they are not available."""

from __future__ import annotations

import threading

import pytest
from conftest import wait_until

from labkit import SpecError
from labkit.frontends.panel.lab import Lab
from labkit.setup import preflight


def test_the_panel_does_not_wait_while_data_are_looked_for(monkeypatch):
    looked, answer = [], threading.Event()

    def available(name, needs, folder):
        looked.append(threading.current_thread())
        answer.wait(60)

    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    monkeypatch.setattr(preflight, "available", available)
    lab = Lab(strategy="ddp", nproc=2, data="mnist")
    assert lab._run_button.disabled and "looking for mnist" in lab._batch.value and not answer.is_set()
    lab._start()
    assert lab.run is None and not lab._starting and not lab._recorded.which.disabled
    with pytest.raises(SpecError, match="mnist is still being looked for"):
        lab._comparable()
    lab._choices.batch.value = 64
    assert "64 per rank" in lab._batch.value
    answer.set()
    wait_until(lambda: not lab._run_button.disabled)
    assert "looking" not in lab._batch.value and lab._comparable()["data"] == "mnist"
    assert threading.main_thread() not in looked and len(set(looked)) == 1, "asked once, and not by the kernel"


def test_data_that_are_not_available_are_refused_until_they_are(monkeypatch):
    refusals = ["mnist is nowhere; use --data digits"]
    monkeypatch.setattr(preflight, "installed", lambda name, needs: None)
    monkeypatch.setattr(preflight, "available", lambda name, needs, folder: refusals[0] if refusals else None)
    lab = Lab(strategy="ddp", nproc=2, data="mnist")
    wait_until(lambda: "mnist is nowhere; use --data digits" in lab._batch.value)
    assert lab._run_button.disabled
    refusals.clear()
    lab._choices.batch.value = 64  # asks again
    wait_until(lambda: not lab._run_button.disabled)
    refusals.append("mnist is nowhere; use --data digits")
    lab._choices.workload.value = ("cnn", "digits")
    assert not lab._run_button.disabled, "nothing must be looked for"
