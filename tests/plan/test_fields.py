"""What the fields of Spec declare: a value has an effect or is refused, and the front ends take what is declared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from labkit.cli.parser import fields_of, parse
from labkit.common.arguments import shown
from labkit.frontends.panel.lab import Choices
from labkit.launch import local
from labkit.plan.script import command, write_script
from labkit.plan.spec import SCRIPT, STRATEGY, Spec, SpecError, about
from labkit.record import clock
from labkit.record.folder import RunFolder
from labkit.setup.machine import Machine

FIELDS = {one.name: one for one in fields(Spec)}
KINDS = {
    STRATEGY: {"strategy": "ddp", "nproc": 2, "device": "cpu"},
    SCRIPT: {"script": "train.py", "nproc": 2, "device": "cpu"},
}
# For each field another value than the default, and where it has an effect: in the generated script, in the displayed
# command, in the arguments of torchrun, or in the environment of the ranks.
VALUES: dict[str, tuple[Any, set[str]]] = {
    "strategy": ("fsdp2", {"script"}),
    "workload": ("mlp", {"script"}),
    "nproc": (4, {"script", "command", "arguments"}),
    "batch_size": (64, {"script"}),
    "scaling": ("strong", {"script"}),
    "epochs": (3, {"script"}),
    "steps": (7, {"script"}),
    "precision": ("bf16", {"script"}),
    "seed": (7, {"script"}),
    "device": ("cuda", {"environment"}),
    "data": ("mnist", {"script"}),
    "data_dir": ("/x", {"script"}),
    "samples": (640, {"script"}),
    "options": ({"bucket_mb": 5}, {"script"}),
    "script": ("other.py", {"command", "arguments"}),
    "args": (("--lr", "0.1"), {"command", "arguments"}),
    "tensors": (True, {"environment"}),
    "save_every": (5, {"script"}),
    "checkpoint_async": (True, {"script"}),
    "resume": ("/x/step5", {"script"}),
    "max_restarts": (2, {"arguments"}),
    "fault": ("slow_rank", {"script"}),
    "sample_every": (7, {"environment"}),
    "hang_after": (9, {"environment"}),
    "as_module": (True, {"command", "arguments"}),
}
# What a field has an effect with only.
WITH: dict[str, dict[str, Any]] = {
    "data_dir": {"data": "mnist"},
    "checkpoint_async": {"strategy": "fsdp2", "save_every": 5},
}
CPU = Machine(gpus=(), cores=4, memory=2**34)


def places(spec: Spec, folder: RunFolder) -> dict[str, Any]:
    plan = local.plan(spec, folder)
    environment = {name: value for name, value in plan.env.items() if name != clock.VARIABLE}
    script = write_script(spec) if spec.script is None else ""
    return {"script": script, "command": command(spec), "arguments": plan.argv, "environment": environment}


def test_every_field_is_tried():
    assert VALUES.keys() == FIELDS.keys()
    assert all(about(one).help for one in FIELDS.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_value_has_an_effect_or_is_refused(name, kind, tmp_path):
    (value, where), base = VALUES[name], KINDS[kind]
    if kind not in about(FIELDS[name]).applies_to:
        with pytest.raises(SpecError) as refused:
            Spec(**base | {name: value})
        sentence = str(refused.value)
        assert refused.value.field == ("strategy" if name == "script" else name)  # of both, the strategy is refused
        assert "\n" not in sentence and "; " in sentence, "the fix follows the reason"
        assert refused.value.field.replace("_", "-") in sentence.replace("_", "-")
        assert (value if name == "script" else shown(value)) in sentence
        return
    base = base | WITH.get(name, {})
    before, after = places(Spec(**base), RunFolder(tmp_path)), places(Spec(**base | {name: value}), RunFolder(tmp_path))
    changed = {place for place in before if before[place] != after[place]}
    assert changed == (where if kind == STRATEGY else where - {"script"})


@pytest.mark.parametrize("data", ["digits", "text"])
def test_a_folder_is_refused_for_data_that_are_not_read_from_files(data):
    with pytest.raises(SpecError, match="data-dir '/x' has no effect") as refused:
        Spec(workload="gpt" if data == "text" else "cnn", data=data, data_dir="/x")
    assert refused.value.field == "data_dir"
    assert ("or use --data mnist" in str(refused.value)) == (data == "digits")


def test_a_recorded_value_without_an_effect_is_left_out():
    """Earlier versions accepted it, and their folders must keep opening."""
    recorded = Spec("ddp", nproc=2).to_json() | {"data_dir": "/x"}
    assert Spec.from_json(recorded) == Spec("ddp", nproc=2)
    recorded = Spec(script="train.py", nproc=2).to_json() | {"precision": "bf16", "seed": 7}
    assert Spec.from_json(recorded) == Spec(script="train.py", nproc=2)


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if about(one).on_command_line])
def test_every_flag_is_the_field(name):
    value, more = VALUES[name][0], WITH.get(name, {})
    words = [
        word
        for field, each in more.items()
        if field != "strategy"
        for word in (f"--{field.replace('_', '-')}", str(each))
    ]
    given = [] if about(FIELDS[name]).switch else [str(value)]
    args = parse(["script", more.get("strategy", "ddp"), f"--{name.replace('_', '-')}", *given, *words])
    assert fields_of(args)[name] == value
    assert getattr(args.specs[0], name) == value


@pytest.mark.parametrize("name", FIELDS)
def test_the_panel_takes_a_field_or_refuses_it(name, monkeypatch):
    value, more = VALUES[name][0], WITH.get(name, {})
    if name == "device":
        value = "cpu"
    if not about(FIELDS[name]).panel:
        with pytest.raises(SpecError, match=f"the panel does not take {name}=") as refused:
            Choices(CPU, {name: value}, lambda: None)
        assert refused.value.field == name
        return
    monkeypatch.setattr("labkit.setup.preflight.installed", lambda name, needs: None)
    spec = Choices(CPU, more | {name: value}, lambda: None).spec()
    found = getattr(spec, name)
    assert found[next(iter(value))] == next(iter(value.values())) if name == "options" else found == value


def test_the_folder_of_another_data_set_is_left_out_in_the_panel(monkeypatch):
    monkeypatch.setattr("labkit.setup.preflight.installed", lambda name, needs: None)
    choices = Choices(CPU, {"data": "mnist", "data_dir": "/x"}, lambda: None)
    assert choices.spec().data_dir == "/x"
    choices.workload.value = ("cnn", "digits")
    assert choices.spec().data_dir is None
    choices.workload.value = ("mlp", "mnist")
    assert choices.spec().data_dir == "/x"
