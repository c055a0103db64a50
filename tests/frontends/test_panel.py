"""The panel without a browser: the choices and their effects."""

from __future__ import annotations

import threading

import pytest
from panels import reading

from labkit import Spec, SpecError
from labkit.frontends.panel import predict as prediction
from labkit.frontends.panel.lab import Choices, Lab
from labkit.setup.machine import Gpu, Machine
from labkit.training.rows import COMMON
from labkit.training.strategies import STRATEGIES

CPU = Machine(gpus=(), cores=2, memory=8 << 30)

T4S = Machine(gpus=tuple(Gpu(index, "Tesla T4", 15 << 30, (7, 5)) for index in range(2)), cores=4, memory=31 << 30)


def choices_of(machine: Machine, **defaults) -> Choices:
    return Choices(machine, defaults, lambda: None)


# ---- the choices


def test_choices_start_as_given_and_make_the_spec():
    spec = choices_of(CPU, strategy="ddp", nproc=2, steps=60, seed=3).spec()
    assert (spec.strategy, spec.nproc, spec.steps, spec.epochs, spec.seed, spec.device) == (
        "ddp",
        2,
        60,
        None,
        3,
        "cpu",
    )


def test_invalid_defaults_are_refused():
    with pytest.raises(SpecError, match="must be one of"):
        choices_of(CPU, strategy="dpp")
    with pytest.raises(SpecError, match="2 GPUs"):
        choices_of(T4S, strategy="ddp", nproc=4)


def test_ranks_follow_the_strategy_and_come_back():
    choices = choices_of(CPU, strategy="ddp", nproc=3)
    choices.strategy.value = "single"
    assert (choices.nproc.value, choices.nproc.disabled) == (1, True)
    choices.strategy.value = "fsdp2"
    assert (choices.nproc.value, choices.nproc.disabled) == (3, False)


def test_a_machine_with_t4s_offers_gpus_and_no_bf16():
    choices = choices_of(T4S)
    assert (choices.device.value, choices.nproc.description, choices.nproc.max) == ("cuda", "GPUs", 2)
    assert choices.precision.options == ("fp32", "fp16")
    choices.device.value = "cpu"
    assert (choices.nproc.description, choices.nproc.max) == ("CPU ranks", T4S.max_cpu_ranks)
    assert choices.precision.options == ("fp32", "bf16")


def test_scaling_keeps_the_global_batch():
    choices = choices_of(CPU, strategy="ddp", nproc=2, batch_size=128)
    choices.scaling.value = "strong"
    assert (choices.batch.value, choices.spec().global_batch) == (256, 256)
    choices.scaling.value = "weak"
    assert choices.batch.value == 128


def test_the_workload_brings_its_batch_and_options():
    choices = choices_of(CPU, strategy="ddp", nproc=2)
    choices.workload.value = ("gpt", "text")
    assert choices.batch.value == 16
    choices._settings.more.value = True
    assert [
        widget.description
        for widget in choices._settings.popover.children
        if hasattr(widget, "description") and widget.description
    ] == [
        "Train on",
        "precision",
        *(option.name for option in STRATEGIES["ddp"].options),
        *(option.name for option in COMMON),
        "size",
        "context",
        "Inject fault",
    ]
    choices.strategy.value = "single"
    options = choices.spec().options
    assert "bucket_mb" not in options
    assert options["size"] == "1M"


# ---- the panel


def test_a_choice_shows_batch_command_script_and_diff_before_run():
    lab = reading(Lab(strategy="ddp", nproc=2, steps=20))
    assert "128 per rank × 2 = 256 global" in lab._batch.value
    assert lab._sources().command.text == "torchrun --standalone --nproc-per-node=2 train.py"
    assert "DistributedDataParallel" in lab._sources().script.value
    assert "labkit-gi" in lab._sources().diff.value
    lab._choices.strategy.value = "single"
    assert "--nproc-per-node=1" in lab._sources().command.text
    assert "DistributedDataParallel" not in lab._sources().script.value
    assert "labkit-empty" in lab._sources().diff.value


def test_the_command_of_each_of_several_nodes_is_shown():
    lab = reading(Lab(strategy="ddp", nproc=2, steps=20, device="cpu"))
    each = "python3 -m labkit run ddp --workload cnn --nproc 4 --steps 20 --precision fp32 --device cpu --data digits"
    assert [text.replace(" --batch-size 128", "") for text in lab._sources().nodes.texts] == [
        f"{each} --nodes 2 --node-rank {rank} --rdzv-endpoint node0:29500" for rank in range(2)
    ]
    shown = lab._sources().nodes._list.children
    lab._sources().nodes.endpoint.value, lab._sources().nodes.nodes.value = "my$host:1", 3
    assert [text.partition(" --nodes ")[2] for text in lab._sources().nodes.texts] == [
        f"3 --node-rank {rank} --rdzv-endpoint 'my$host:1'" for rank in range(3)
    ]
    assert lab._sources().nodes._list.children[:2] == shown
    lab._sources().nodes.endpoint.value = "<b>"
    assert lab._sources().nodes.texts == [] and "&lt;b&gt;" in lab._sources().nodes.said.value
    lab._sources().nodes.endpoint.value = "a:1"
    lab._choices.strategy.value = "single"
    assert lab._sources().nodes.texts == [] and "single trains on one device" in lab._sources().nodes.said.value


def test_a_machine_that_lacks_the_precision_says_so_until_another_is_chosen(monkeypatch):
    monkeypatch.setattr(prediction, "predict", lambda spec, cancelled: {"method": "simulated"})
    spec = Spec("ddp", nproc=2, device="cpu", precision="bf16")
    one = prediction.Predict(lambda: spec, lambda spec: None, lambda spec: None)
    one.machine.value = "t4x2"
    one._predict(spec, "t4x2", threading.Event())
    assert one.known(spec).startswith("precision on NVIDIA T4 must be one of ")
    one.machine.value = "a100x8"
    assert one.known(spec) is None


def test_what_cannot_run_is_one_sentence_and_no_run():
    lab = Lab(strategy="ddp", nproc=2, steps=20)
    lab._choices.scaling.value = "strong"
    lab._choices.batch.value = 255
    assert "is not divisible by 2 ranks" in lab._batch.value
    assert lab._run_button.disabled
    lab._choices.batch.value = 256
    assert not lab._run_button.disabled


def test_run_in_the_panel_to_its_end_without_torch_in_this_process(runs):
    import subprocess
    import sys

    code = """
import sys, labkit
lab = labkit.Lab(strategy="ddp", nproc=2, steps=4, samples=600, workload="mlp", device="cpu")
lab._run_button.click()
assert lab._run_button.disabled
import time
while lab.run is None: time.sleep(0.05)
lab._view.wait(120)
assert "finished" in lab._view.words.value, (lab._view.words.value, lab._view.finding.value)
assert not lab._run_button.disabled and lab._view.stop_button.disabled
assert lab._view.state.step == 4
print([name for name in ("torch", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "[]", done.stderr


# ---- strategies behind "more", and the Compare tab


def test_further_strategies_are_in_the_list_more_and_one_is_selected_at_a_time():
    choices = choices_of(CPU, strategy="ddp", nproc=2)
    choices.further.value = "fsdp"
    assert (choices.chosen, choices.strategy.value) == ("fsdp", None)
    assert "mod-active" in choices.further._dom_classes
    assert choices.spec().strategy == "fsdp"
    choices.further.value = ""
    assert (choices.chosen, choices.further.value) == ("fsdp", "fsdp"), "'more' is not a strategy"
    choices.strategy.value = "tp"
    assert (choices.chosen, choices.further.value) == ("tp", "")
    assert "mod-active" not in choices.further._dom_classes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_chosen_and_says_what_is_wrong(strategy):
    lab = Lab(strategy="ddp", nproc=2)
    choices = lab._choices
    (choices.further if STRATEGIES[strategy].further else choices.strategy).value = strategy
    assert choices.chosen == strategy
    assert STRATEGIES[strategy].splits.partition(":")[0] in choices.explanation.value
    assert "labkit-batch" in lab._batch.value or "labkit-finding" in lab._batch.value
    assert lab._run_button.disabled == ("labkit-finding" in lab._batch.value)


def test_fp16_is_no_choice_where_a_strategy_lacks_it():
    choices = choices_of(T4S, strategy="ddp", nproc=2)
    assert (choices.precision.value, choices.precision.options) == ("fp16", ("fp32", "fp16"))
    choices.strategy.value = "tp"
    assert (choices.precision.value, choices.precision.options) == ("fp32", ("fp32",))


def test_comparison_takes_the_present_choices():
    lab = Lab(strategy="ddp", nproc=2, workload="mlp", steps=5)
    fields = lab._choices.comparable()
    assert (fields["workload"], fields["steps"], fields["batch_size"], fields["scaling"]) == ("mlp", 5, 256, "strong")
