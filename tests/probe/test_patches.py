"""Wrappers and hooks of the probe: installed once, guarded one by one, and removed without a trace."""

from __future__ import annotations

import sys

import pytest
import torch
from probed import Told
from torch.utils.file_baton import FileBaton

from labkit.probe import hooks
from labkit.probe.journal import Journal
from labkit.probe.patches import TARGETS, Patches
from labkit.probe.torch_private import LOST, MissingName, find

WRAPPED = [(part, name) for part, names in TARGETS.items() for name in names if ".register_" not in name]


@pytest.fixture
def patches(tmp_path, request):
    made = Patches(Journal(tmp_path, 0))
    request.addfinalizer(made.remove)
    return made


def now() -> dict[str, object]:
    """What every name of the table stands for."""
    found = {}
    for part, names in TARGETS.items():
        for name, elsewhere in names.items():
            for each in (name, *elsewhere):
                try:
                    found[each] = find(each, part)
                except MissingName:
                    found[each] = None
    return found


def passing(original):
    return lambda *args, **named: original(*args, **named)


@pytest.mark.parametrize(("part", "name"), WRAPPED)
def test_a_function_is_wrapped_once_and_restored(patches, part, name):
    before, own = now(), set(vars(torch.Tensor))
    assert part in LOST
    assert patches.wrap(part, name, passing)
    during = now()
    assert during[name] is not before[name] and during[name].__wrapped__ is before[name]
    changed = {each for each in before if during[each] is not before[each]}
    assert changed == {each for each in (name, *TARGETS[part][name]) if before[each] is before[name]}
    assert patches.wrap(part, name, passing) and now() == during
    patches.remove()
    assert now() == before and set(vars(torch.Tensor)) == own


def test_two_parts_may_wrap_one_function(patches):
    name, before = "torch.utils.data.DataLoader.__iter__", now()
    assert patches.wrap("data loading", name, passing) and patches.wrap("data loaders", name, passing)
    assert now()[name].__wrapped__.__wrapped__ is before[name]
    assert patches.wrap("data loading", name, passing) and now()[name].__wrapped__.__wrapped__ is before[name]
    patches.remove()
    assert now() == before


def test_a_wrapper_around_the_probes_is_left_alone(patches, monkeypatch):
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # so that monkeypatch restores it
    patches.wrap("builds", "torch.utils.file_baton.FileBaton.wait", passing)
    FileBaton.wait = theirs = passing(FileBaton.wait)
    patches.remove()
    assert FileBaton.wait is theirs


def test_a_function_that_is_missing_costs_its_part_and_nothing_else(patches, tmp_path, monkeypatch):
    monkeypatch.delattr(FileBaton, "wait")
    assert not patches.wrap("builds", "torch.utils.file_baton.FileBaton.wait", passing)
    assert patches.wrap("builds", "torch.utils.file_baton.FileBaton.release", passing)
    assert patches.wrap("saved files", "torch.save", passing)
    (event,) = Told(tmp_path).of("probe_error")
    assert event["part"] == "builds"
    assert event["message"] == (
        f"torch {torch.__version__} has no torch.utils.file_baton.FileBaton.wait: {LOST['builds']}"
    )


def registered() -> list[int]:
    module, optimizer = torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__]
    dictionaries = (
        *(module._global_forward_pre_hooks, module._global_forward_hooks),
        *(optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),
    )
    return [len(each) for each in dictionaries]


def test_the_whole_probe_is_installed_once_and_removed(patches, tmp_path):
    before, hooked = now(), registered()
    journal = Journal(tmp_path, 0)
    watch = hooks.install(journal, patches, str(tmp_path), 0)
    hooks.keep_tensors(watch, journal, patches, str(tmp_path), 0)
    during = now()
    unchanged = {name for name, found in during.items() if found is before[name]}
    later = set(TARGETS["stores"]) | set(TARGETS["halves of backward"])  # when the script has imported pipelines
    assert unchanged == {name for name in during if ".register_" in name} | later
    assert [after - one for after, one in zip(registered(), hooked)] == [1, 1, 2, 1]
    patches.remove()
    assert now() == before and registered() == hooked
    assert Told(tmp_path).of("probe_error") == []


def test_every_lost_part_says_what_is_not_measured():
    assert set(TARGETS) <= set(LOST)
    assert all(len(lost) > 10 and not lost.endswith(".") for lost in LOST.values())
