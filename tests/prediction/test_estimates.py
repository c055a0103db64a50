"""Estimates in closed form, against published formulas and figures, the formulas of the lab, and a trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from decoders import GPT2, GPT3, LLAMA, LLAMA3, gpt, of

from labkit.analysis.theory.collectives import bus_factor
from labkit.analysis.theory.formulas import states, theory
from labkit.plan.spec import Spec
from labkit.prediction.devices import DEVICES
from labkit.prediction.predict import predict
from labkit.prediction.scale.advice import training
from labkit.prediction.scale.layouts import FRAMEWORKS, SHARDINGS, Layout
from labkit.prediction.scale.model import of_config, of_parameters, of_workload
from labkit.prediction.scale.step import AXES, estimate, memory
from labkit.training.workloads import WORKLOADS

# ---- models


@pytest.mark.parametrize(
    ("said", "parameters"),
    [(GPT2, 124_439_808), (GPT3, 174_604_259_328), (LLAMA, 6_738_415_616), (LLAMA3, 8_030_261_248)],
)
def test_published_numbers_of_parameters(tmp_path, said, parameters):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said))
    assert of_config(path).parameters == parameters


@pytest.mark.parametrize("size", ["1M", "10M", "100M", "1B", "7B"])
def test_workloads_have_the_parameters_and_operations_of_the_lab(size):
    model, row = of_workload("gpt", {"size": size}), WORKLOADS["gpt"]
    options = Spec("single", "gpt", options={"size": size}).options
    assert model.parameters == row.parameters(options)
    additions = model.positions * model.width  # of the embedding, which the lab counts as well
    assert model.training_flops(model.positions) * model.positions == 3 * (sum(row.costs(options)) - additions)


@pytest.mark.parametrize("asked", ["125M", "1.3B", "7B", "13B", "30B", "70B", "175B", "405B", "1T"])
def test_a_count_gives_a_model_of_about_that_count_that_can_be_split(asked):
    model = of_parameters(asked)
    wanted = float(asked[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[asked[-1]]
    assert abs(model.parameters / wanted - 1) < 0.005
    assert 2 < model.hidden / model.width < 4
    assert model.heads % 4 == 0 and model.layers % 4 == 0 and model.heads * model.head_width == model.width
    assert of_parameters(asked) == model


def test_operations_of_a_step_are_those_of_narayanan_and_korthikanti():
    """72·B·s·L·h²·(1 + s/6h + v/12hL), Korthikanti et al. 2022, appendix A."""
    layers, width, vocabulary, sequence = 24, 2048, 51_200, 1024
    model = gpt(layers, width, 16, vocabulary, sequence)
    formula = 72 * layers * width**2 * (1 + sequence / (6 * width) + vocabulary / (12 * width * layers))
    assert model.training_flops(sequence) == pytest.approx(formula)
    assert model.training_flops(0) == 6 * (model.layers * model.of_matrices + vocabulary * width)  # 6ND


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_a_layer_are_those_of_korthikanti(tensor):
    """sbh/t · (34 + 5as/h), section 4.2.2, and 34 alone without the matrices of attention, section 5."""
    sequence, batch, heads, width = 2048, 4, 96, 12288
    model = gpt(96, width, heads, 51_200, sequence, dropout=True)
    stored = model.layer_activations(batch * sequence, sequence, tensor, 2, "eager")
    assert stored == sequence * batch * width / tensor * (34 + 5 * heads * sequence / width)
    fused = model.layer_activations(batch * sequence, sequence, tensor, 2, "fused")
    assert fused == pytest.approx(sequence * batch * width / tensor * 34, rel=0.002)  # and one number per row
    assert model.layer_input(batch * sequence, 1, 2) == 2 * sequence * batch * width  # full recomputation


# ---- memory


def test_states_are_those_of_the_zero_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 devices need 120, 31.4, 16.6 and 1.9 GB."""
    model = gpt(1, 64, 1, 1, 1, learned=False, tied=False)
    model = replace(model, hidden=(7_500_000_000 - 4 * 64**2 - 4 * 64 - 64) // (2 * 64))
    assert model.parameters == pytest.approx(7.5e9, rel=1e-6)
    asked = of(model, 64, 64)
    stored = [memory(asked, Layout(SHARDINGS[name], 64, 64)).states.total for name in ("ddp", "zero1", "zero2", "fsdp")]
    assert [round(each / 1e9, 1) for each in stored] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(("strategy", "sharding"), [("ddp", "ddp"), ("fsdp2", "fsdp")])
def test_memory_agrees_with_the_formulas_of_the_lab_and_the_trace(strategy, sharding):
    spec = Spec(strategy, "gpt", nproc=2, batch_size=8, device="cpu", precision="fp32", options={"size": "10M"})
    asked = training(workload="gpt", options={"size": "10M"}, devices=2, batch=16, machine="a100x8", precision="fp32")
    found = memory(asked, Layout(SHARDINGS[sharding], 2, 2, micro_batch=8))
    assert (found.states,) * 2 == states(spec)
    [traced, _] = predict(spec).ranks
    assert traced.at_peak["activations"] == pytest.approx(found.activations, rel=0.06)
    assert traced.peak_memory_bytes < found.total < 1.15 * traced.peak_memory_bytes


def test_a_pipeline_stores_as_many_micro_batches_as_it_has_stages():
    model = gpt(8, 1024, 16, 10_000, 512)
    asked = of(model, 4, 32, sequence=512)
    one = memory(asked, Layout(SHARDINGS["ddp"], pipeline=4, micro_batches=1)).activations
    four = memory(asked, Layout(SHARDINGS["ddp"], pipeline=4, micro_batches=32)).activations
    layer = model.layer_activations(512, 512, 1, 2, "fused")
    assert four == 4 * 2 * layer  # the first stage: 4 micro-batches through 2 layers, without the logits
    assert one == 2 * layer + model.head_activations(512, 1, 2)  # the last stage: its layers and the logits
    asked = replace(asked, model=replace(model, vocabulary=8))
    recomputed = memory(asked, Layout(SHARDINGS["ddp"], pipeline=4, micro_batches=32, recompute="full")).activations
    assert recomputed == 4 * 2 * 2 * 512 * 1024 + layer


# ---- time and traffic


def test_the_bubble_is_that_of_the_formula():
    """(p − 1)/m of the ideal time, Narayanan et al. 2021, section 2.2.1; divided by the chunks of an interleaved
    schedule, section 2.2.2."""
    asked = of(gpt(8, 8192, 64, 8, 2048), 4, 32, sequence=2048)
    layout = Layout(SHARDINGS["ddp"], pipeline=4, micro_batches=32)
    parts = estimate(asked, layout).parts
    ideal = parts["computation"] + parts["pipeline"]
    assert parts["bubble"] == pytest.approx(3 / 32 * ideal, rel=0.01)
    interleaved = estimate(asked, replace(layout, chunks=2)).parts
    assert interleaved["bubble"] == pytest.approx(parts["bubble"] / 2, rel=0.01)
    assert interleaved["pipeline"] == pytest.approx(2 * parts["pipeline"])


@pytest.mark.parametrize(
    ("name", "gradients", "parameters"), [("ddp", 2, 0), ("zero1", 1, 1), ("zero2", 1, 1), ("fsdp", 1, 2)]
)
def test_traffic_of_data_parallelism_is_that_of_the_zero_paper(name, gradients, parameters):
    """Section 7: an all-reduce sends 2Ψ, ZeRO-1 and ZeRO-2 send as much, ZeRO-3 sends 3Ψ; in 16 bits, 2 bytes each."""
    model = gpt(4, 256, 4, 1000, 128)
    asked = of(model, 8, 8, sequence=128)
    layout = Layout(SHARDINGS[name], 8, 8)
    found = estimate(asked, layout, memory(asked, layout))
    assert found.sent["data"] == pytest.approx(2 * (gradients + parameters) * model.parameters * 7 / 8)


def test_hybrid_sharding_all_reduces_only_shards_between_its_groups():
    """Zhao et al. 2023, section 3.2.2: as FSDP in a group of 4, then an all-reduce of Ψ/4 between 2 groups."""
    asked = of(gpt(4, 256, 4, 1000, 128), 8, 8, sequence=128)
    layout = Layout(SHARDINGS["hsdp"], 8, 4)
    found = estimate(asked, layout, memory(asked, layout))
    assert found.sent["data"] == pytest.approx(2 * asked.model.parameters * (3 * 3 / 4 + 1 / 4))
    assert not any(found.sent[axis] for axis in AXES if axis != "data")


def test_busy_time_of_a_large_all_reduce_is_nccl_bus_bandwidth():
    """Bus bandwidth = 2(n−1)/n · size / seconds (nccl-tests), here that of the links."""
    asked = of(gpt(1, 12288, 96, 8, 128), 8, 8, sequence=128)
    layout = Layout(SHARDINGS["ddp"], 8, 8)
    found = estimate(asked, layout, memory(asked, layout))
    inside = DEVICES["a100x8"].inside
    assert inside
    measured = bus_factor("all_reduce", 8) * 2 * asked.model.parameters / found.busy["data"]
    assert measured == pytest.approx(inside.simple.bandwidth, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "options", "layout"),
    [
        ("ddp", {}, Layout(SHARDINGS["ddp"], 2, 2, micro_batch=4)),
        ("fsdp2", {}, Layout(SHARDINGS["fsdp"], 2, 2, micro_batch=4)),
        ("cp", {}, Layout(SHARDINGS["ddp"], 1, 2, context=2, micro_batch=4)),
        ("tp", {"sequence_parallel": True, "loss_parallel": True}, Layout(SHARDINGS["ddp"], tensor=2, micro_batch=4)),
        ("pp", {"micro_batches": 4}, Layout(SHARDINGS["ddp"], pipeline=2, micro_batches=4)),
    ],
)
def test_traffic_is_that_of_the_formulas_of_the_lab(strategy, options, layout):
    """The textbook part of them, without the flows of a few numbers."""
    spec = Spec(strategy, "gpt", nproc=2, batch_size=4, device="cuda", precision="fp32", options=options)
    asked = training(workload="gpt", devices=2, batch=4 * layout.data, machine="a100x8", precision="fp32")
    sent = estimate(asked, layout, memory(asked, layout)).sent
    expected = sum(flow.theory for flow in theory(spec) or () if "3·4·B·T" not in flow.formula)
    assert 2 * sum(sent.values()) == pytest.approx(expected) and expected


def test_recomputation_repeats_the_collectives_of_tensor_parallelism():
    """Three of the four of forward (all-gather, reduce-scatter, all-gather), and they are exposed."""
    asked = of(gpt(4, 1024, 16, 1000, 512), 8, 4, sequence=512)
    layouts_of = (
        Layout(SHARDINGS["ddp"], tensor=8, micro_batch=4, recompute="full" if again else "none")
        for again in (False, True)
    )
    once, again = (estimate(asked, layout, memory(asked, layout)) for layout in layouts_of)
    assert again.sent["tensor"] - once.sent["tensor"] == 4 * 3 * 2 * 512 * 4 * 1024 * 7 / 8
    assert again.busy["tensor"] < again.parts["tensor"]
    hidden = estimate(asked, replace(again.layout, asynchronous=True))
    assert hidden.parts["tensor"] < again.parts["tensor"]


def test_communication_that_computation_covers_is_not_exposed():
    long, short = (of(gpt(24, 2048, 16, 1000, 2048), 8, batch, sequence=2048) for batch in (512, 8))
    exposed = {}
    for asked in (long, short):
        layout = Layout(SHARDINGS["ddp"], 8, 8, micro_batch=asked.batch // 8)
        found = estimate(asked, layout, memory(asked, layout))
        exposed[asked.batch] = found.parts["data"] / found.busy["data"]
        assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert exposed[512] < 0.1  # one layer of 24, and the embedding
    slow = replace(short, sequence=8)
    layout = Layout(SHARDINGS["ddp"], 8, 8)
    found = estimate(slow, layout, memory(slow, layout))
    assert found.parts["data"] > 0.85 * found.busy["data"] and found.communication_bound


# Layers, width, heads of the MPT models; sequence 2,048, FSDP on nodes of 8: machine, model, devices, samples of a
# micro-batch, accumulation, recomputation, and the measured MFU in percent. MosaicML LLM Foundry,
# scripts/train/benchmarking (tables H100 80GB BF16 and A100 80GB).
MPT = {"1b": (24, 2048, 16), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (64, 9216, 72)}
PUBLISHED = (
    ("a100x8", "1b", 8, 14, 4, False, 59.86),
    ("a100x8", "7b", 8, 6, 2, False, 64.23),
    ("a100x8", "13b", 8, 2, 3, False, 59.57),
    ("a100x8", "30b", 8, 3, 21, True, 55.3),
    ("a100x8", "70b", 32, 2, 16, True, 48.56),
    ("a100x8", "70b", 64, 8, 4, True, 53.33),
    ("h100x8", "7b", 8, 6, 1, False, 46.44),
    ("h100x8", "13b", 128, 16, 1, True, 42.18),
    ("h100x8", "30b", 8, 3, 21, True, 38.11),
    ("h100x8", "70b", 32, 2, 16, True, 36.15),
    ("h100x8", "70b", 64, 8, 4, True, 42.57),
)


@pytest.mark.parametrize(("machine", "name", "devices", "samples", "times", "again", "measured"), PUBLISHED)
def test_published_runs_fit_and_are_within_a_quarter(machine, name, devices, samples, times, again, measured):
    """A sanity band of single runs; their medians are far smaller (labkit/MEASUREMENTS.md)."""
    asked = training("7B", devices=devices, batch=devices * samples * times, sequence=2048, machine=machine)
    asked = replace(asked, model=gpt(*MPT[name], 50_368, 2048))
    layout = Layout(
        SHARDINGS["fsdp"],
        devices,
        devices,
        micro_batch=samples,
        micro_batches=times,
        recompute="full" if again else "none",
        compiled=False,
        framework=FRAMEWORKS["llm-foundry"],
    )
    found = estimate(asked, layout)
    assert found.fits
    assert 100 * found.mfu == pytest.approx(measured, rel=0.25)


def test_full_recomputation_costs_what_korthikanti_measured():
    """530B parameters on 2,240 A100 (8 tensor × 35 pipeline × 8 data): 54.2 % MFU, 29 % faster than with full
    recomputation (Korthikanti et al. 2022, abstract; the faster run recomputes the matrices of attention only)."""
    asked = of(gpt(105, 20_480, 128, 51_200, 2048), 2240, 2240, sequence=2048)
    stored, again = (
        Layout(SHARDINGS["ddp"], 8, 8, tensor=8, pipeline=35, micro_batches=280, recompute=recompute)
        for recompute in ("none", "full")
    )
    fast, slow = (estimate(asked, layout, memory(asked, layout)) for layout in (stored, again))
    assert fast.memory.total <= asked.usable
    assert slow.seconds / fast.seconds == pytest.approx(1.29, rel=0.05)
    assert fast.mfu == pytest.approx(0.542, rel=0.15)
