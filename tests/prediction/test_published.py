"""Estimates of one layout, and of published runs: what rows mean, how well they agree, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import exp

import pytest
from commands import called
from decoders import LLAMA, gpt, of

from labkit import advise
from labkit.prediction.devices import DEVICES
from labkit.prediction.links import communication
from labkit.prediction.scale.advice import FIELDS, laid, machine_of
from labkit.prediction.scale.atlas import COLUMNS, RUNS, check, of_row
from labkit.prediction.scale.layouts import FRAMEWORKS, SHARDINGS, Layout, stages
from labkit.prediction.scale.step import estimate, memory

NANOTRON = FRAMEWORKS["nanotron"]
PLAYBOOK = dict.fromkeys(COLUMNS, "") | {
    **{"source": "HF Ultra-Scale Playbook", "model": "nanotron Llama 1B", "layers": "16", "hidden": "2048"},
    **{"heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072", "seq": "4096", "gpus": "64"},
    **{"gpu_type": "H100 80GB (EFA)", "strategy": "DP + PP + TP/SP, ZeRO-1", "tp": "4", "pp": "2", "cp": "1"},
    **{"dp": "8", "precision": "bf16, fp32 gradient accumulation", "micro_batch": "2", "global_batch": "256"},
    **{"tokens_per_s_per_gpu": "7421", "memory_gib": "6.4"},
}
TITAN = PLAYBOOK | {
    **{"source": "torchtitan", "model": "Llama 3.1 405B", "layers": "126", "hidden": "16384", "heads": "128"},
    **{"kv_heads": "8", "ffn": "53248", "vocab": "128256", "seq": "8192", "gpus": "512", "tp": "8", "pp": "8"},
    **{"gpu_type": "H100 SXM 96GB HBM2e 500W", "precision": "float8", "activation_checkpointing": "full"},
    **{"strategy": "FSDP + TP + PP (Interleaved 1F1B) + torch.compile + Float8 + AsyncTP"},
    **{"micro_batch": "local batch 32", "tokens_per_s_per_gpu": "128", "memory_gib": "72.7"},
}
TUNE = PLAYBOOK | {
    **{"source": "torchtune", "model": "Llama 3.2 3B", "layers": "28", "hidden": "3072", "heads": "24"},
    **{"kv_heads": "8", "ffn": "8192", "vocab": "128256", "gpus": "1", "gpu_type": "A100", "tp": "1", "pp": "1"},
    **{"dp": "1", "precision": "bf16 (pure)", "strategy": "single, + activation checkpointing", "global_batch": ""},
    **{"activation_checkpointing": "full", "where": "cumulative"},
}


# ---- rows


def test_a_row_says_model_machine_layout_and_what_was_measured():
    run = of_row(PLAYBOOK)
    assert run.training.model.parameters == pytest.approx(1.34e9, rel=0.01) and run.training.model.tied
    assert run.training.machine.name == "h100x8-efa" and run.training.batch == 256 and run.training.devices == 64
    layout = run.layout
    assert (layout.title, layout.micro_batch, layout.micro_batches) == ("ZeRO-1 8 × TP 4 × PP 2", 2, 16)
    assert layout.framework is NANOTRON and not layout.compiled and layout.recompute == "none"
    assert run.measured.tokens_per_second_per_gpu == 7421 and run.measured.fits
    assert run.measured.memory == 6.4 * 2**30
    crashed = of_row(PLAYBOOK | {"tokens_per_s_per_gpu": "", "memory_gib": "crashed/OOM"})
    assert crashed.measured.fits is False and crashed.measured.memory is None


def test_words_of_a_strategy_say_how_it_runs():
    run = of_row(TITAN)
    layout = run.layout
    assert (layout.micro_batch, layout.micro_batches, layout.chunks) == (4, 8, 2)
    assert layout.compiled and layout.asynchronous and layout.recompute == "full"
    assert run.training.precision == "fp8" and run.training.machine.name == "h100x8-96gb"
    rowwise = of_row(TITAN | {"precision": "float8 rowwise"})
    assert estimate(rowwise.training, layout).seconds > estimate(run.training, layout).seconds


def test_rows_of_a_cumulative_table_include_what_was_added_before():
    layout = of_row(TUNE).layout
    assert (
        layout.compiled and layout.loss == "chunked" and layout.recompute == "full" and layout.sharding.name == "single"
    )
    in_backward = of_row(TUNE | {"strategy": "single, + optimizer step in backward"})
    assert in_backward.layout.framework.name == "torchtune-step-in-backward"
    needs = [memory(of_row(TUNE).training, one.layout).states.gradients for one in (of_row(TUNE), in_backward)]
    assert needs[0] > 2 * needs[1]


@pytest.mark.parametrize(
    ("speed", "tokens"),
    [
        ({"step_seconds": "2"}, 256 * 4096 / 64 / 2),
        ({"tflops_per_gpu": "100"}, None),
        ({"mfu_percent": "10"}, None),
    ],
)
def test_speed_is_read_in_every_form(speed, tokens):
    run = of_row(PLAYBOOK | {"tokens_per_s_per_gpu": ""} | speed)
    found = run.measured.tokens_per_second_per_gpu
    assert found is not None
    flops = found * run.training.model.training_flops(4096)
    expected = {"tflops_per_gpu": 100e12, "mfu_percent": 0.1 * 989.4e12}.get(next(iter(speed)))
    assert found == pytest.approx(tokens) if tokens else flops == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seq": ""}, "the length of a sequence is not said"),
        ({"layers": ""}, "layers is empty"),
        ({"layers": "many"}, "layers is 'many', which is not a positive integer"),
        ({"gpu_type": "H99"}, "the GPU 'H99' is not in the table"),
        ({"gpus": "32"}, "the degrees multiply to 64 ranks, and there are 32 GPUs"),
        ({"micro_batch": "3"}, "not a multiple of 8 ranks × 3 samples"),
        ({"strategy": "prefix tuning"}, "adapters other than LoRA are not modelled"),
        ({"strategy": "FSDP, CPU offload"}, "offloading of model states to the CPU is not modelled"),
        ({"strategy": "MoE, ep 8"}, "mixtures of experts are not modelled"),
        ({"strategy": "", "tp": "", "dp": ""}, "no configuration is said"),
        ({"gpu_type": "A100", "precision": "fp8"}, "NVIDIA A100 SXM 80 GB has no peak for fp8"),
        ({"gpu_type": "RTX 4090"}, "64 GPUs are more than"),
    ],
)
def test_a_row_that_cannot_be_computed_is_refused_in_a_sentence(changed, said):
    with pytest.raises(ValueError, match=said) as caught:
        of_row(PLAYBOOK | changed)
    assert "\n" not in str(caught.value)


def test_flops_of_megatron_count_full_recomputation():
    said = {"source": "Megatron-LM", "model": "GPT", "tokens_per_s_per_gpu": "", "tflops_per_gpu": "100"}
    run, again = (of_row(PLAYBOOK | said | {"activation_checkpointing": how}) for how in ("none", "full"))
    speeds = [one.measured.tokens_per_second_per_gpu for one in (run, again)]
    assert speeds[0] == pytest.approx(4 / 3 * speeds[1])


# GPUs, layers, width, heads, TP, PP, micro-batch, samples per step, TFLOP/s per GPU with full recomputation: Narayanan
# et al. 2021, tables 1 and 2, on A100 (Selene). None of these runs was fitted.
PTD_P = (
    (32, 24, 2304, 24, 1, 1, 16, 512, 137),
    (384, 96, 12_288, 96, 8, 12, 1, 1536, 153),
    (3072, 128, 25_600, 160, 8, 64, 1, 3072, 163),
)


@pytest.mark.parametrize(("gpus", "layers", "width", "heads", "tp", "pp", "micro_batch", "batch", "tflops"), PTD_P)
def test_runs_that_were_not_fitted_are_near(gpus, layers, width, heads, tp, pp, micro_batch, batch, tflops):
    said = {"source": "Megatron-LM (Narayanan 2021)", "model": "GPT", "gpu_type": "A100 80GB", "strategy": "PTD-P"}
    said |= {"layers": layers, "hidden": width, "heads": heads, "kv_heads": heads, "ffn": 4 * width, "vocab": 51_200}
    said |= {"seq": 2048, "gpus": gpus, "tp": tp, "pp": pp, "dp": gpus // tp // pp, "precision": "fp16"}
    said |= {"activation_checkpointing": "full", "micro_batch": micro_batch, "global_batch": batch}
    said |= {"tokens_per_s_per_gpu": "", "memory_gib": "", "tflops_per_gpu": tflops}
    run = of_row(PLAYBOOK | {name: str(value) for name, value in said.items()})
    found = estimate(run.training, run.layout).tokens_per_second_per_gpu
    assert found == pytest.approx(run.measured.tokens_per_second_per_gpu, rel=0.15)


# ---- agreement


def write(path, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return path


def variants(speed) -> list[dict[str, str]]:
    """Five layouts with the speed that a function makes of the modelled one and its place in the modelled order."""
    rows = [PLAYBOOK | {"tp": tp, "dp": str(32 // int(tp))} for tp in ("1", "2", "4", "8")]
    rows.append(PLAYBOOK | {"micro_batch": "1"})
    modelled = [estimate(run.training, run.layout).tokens_per_second_per_gpu for run in map(of_row, rows)]
    places = sorted(range(5), key=lambda number: -modelled[number])
    return [
        row | {"tokens_per_s_per_gpu": f"{speed(modelled[number], places.index(number)):.6f}", "memory_gib": ""}
        for number, row in enumerate(rows)
    ]


def test_agreement_is_perfect_for_runs_as_modelled_and_reversed_for_the_opposite(tmp_path):
    [found, *_] = check(write(tmp_path / "equal.csv", variants(lambda speed, place: speed))).agreements
    assert found.speed == pytest.approx((0, 0), abs=1e-6) and found.within_speed == 1 == found.fits
    assert (found.groups, found.order, found.regret) == (1, pytest.approx(1), (1, 1)) and found.memory is None
    [found, *_] = check(write(tmp_path / "faster.csv", variants(lambda speed, place: speed / 2))).agreements
    assert (
        found.speed == pytest.approx((1, 1), rel=1e-4) and found.within_speed == 0 and found.order == pytest.approx(1)
    )
    [found, *_] = check(write(tmp_path / "reversed.csv", variants(lambda speed, place: 1000 * (1 + place)))).agreements
    assert found.order == pytest.approx(-1) and found.regret == (0.2, 0.2)


@pytest.mark.thorough
def test_the_shipped_runs_agree_with_their_estimates():
    """What labkit/MEASUREMENTS.md reports of the runs that constants were fitted to, with some room."""
    checked = check(RUNS)
    parts = {one.name: one for one in checked.agreements}
    near, many = parts["2 to 64 GPUs, TP within a node"], parts["65 to 256 GPUs"]
    assert near.speed[0] < 0.06 and near.speed[1] < 0.3 and many.speed[0] < 0.12
    assert parts["one GPU"].speed[0] < 0.12
    everything = parts["up to 256 GPUs"]
    assert everything.order > 0.9 and everything.regret[0] > 0.97 and everything.regret[1] > 0.85
    assert everything.memory[0] < 0.08 and everything.fits > 0.95
    assert 0.75 < everything.within_speed < 0.9 and 0.75 < everything.within_memory < 0.9
    assert len(checked.refused) < 0.01 * len(checked.pairs)


# ---- terms


def playbook(tensor=1, pipeline=1, micro_batch=1, data=1, machine="h100x8-efa", **more) -> Layout:
    count = 256 // data // micro_batch
    sharding = SHARDINGS["zero1"]
    return Layout(
        *(sharding, data, data, tensor, pipeline, 1, micro_batch, count),
        **{"framework": NANOTRON, "compiled": False, **more},
    )


def seconds(layout: Layout, machine: str = "h100x8-efa", **changed) -> float:
    asked = of_row(PLAYBOOK).training
    row = DEVICES[machine]
    links = communication(machine)
    asked = replace(asked, devices=layout.devices, machine=row, accelerator=row.accelerator, links=links, **changed)
    return estimate(asked, layout).seconds


def test_short_kernels_take_as_long_as_their_launch():
    """With TP 8, a micro-batch of one sample takes as long as one of two; with four times as many, it does not."""
    one, two, many = (seconds(playbook(tensor=8, micro_batch=size)) / (256 // size) for size in (1, 2, 16))
    assert two == pytest.approx(one, rel=0.1) and many > 2 * one
    compiled = seconds(playbook(tensor=8, compiled=True, framework=FRAMEWORKS["pytorch"]))
    assert compiled < 0.5 * 256 * one


def test_ranks_of_a_pipeline_over_nodes_wait_for_each_other_the_longer_the_more_share_a_layer():
    alone, several = seconds(playbook(tensor=4, pipeline=2)), seconds(playbook(tensor=4, pipeline=4))
    assert several > 1.5 * alone  # on two nodes, with half as many layers per stage
    assert seconds(playbook(tensor=8, pipeline=2)) > 1.3 * seconds(playbook(tensor=4, pipeline=4)) / 2


def test_stages_of_nanotron_have_equal_costs():
    """The head of the 1B model costs as much as 4 of its 16 layers: with 8 stages it is with the last layer."""
    model = of_row(PLAYBOOK).training.model
    assert [stage.layers for stage in stages(model, 4, True)] == [5, 5, 5, 1]
    every = stages(model, 8, True)
    assert sum(stage.layers for stage in every) == 16 and [stage.last for stage in every].index(True) == 6
    assert playbook(pipeline=16, micro_batch=1).refused(model) and not playbook(pipeline=8).refused(model)
    few = replace(playbook(pipeline=8), micro_batches=4)
    assert "needs at least 7 micro-batches" in few.refused(model)
    assert [stage.layers for stage in stages(model, 5, False)] == [4, 3, 3, 3, 3]


def test_products_with_short_sides_are_less_efficient():
    asked = of_row(PLAYBOOK).training
    large = asked.product(8192, 8192, 8192, layers=True) / 8192**3
    small = asked.product(8192, 8192, 128, layers=True) / (8192**2 * 128)
    assert 1.5 * large < small < 2.5 * large
    assert 2 / large / asked.accelerator.flops["bf16"] == pytest.approx(asked.accelerator.efficiency, rel=0.05)


def test_recomputation_offload_and_chunked_losses_exchange_time_for_memory():
    asked = of(gpt(24, 4096, 32, 128_000, 4096), 8, 8, sequence=4096)
    layout = Layout(SHARDINGS["fsdp"], 8, 8, framework=FRAMEWORKS["torchtitan"])
    found = {how: estimate(asked, replace(layout, recompute=how)) for how in ("none", "selective", "full")}
    assert found["none"].seconds < found["selective"].seconds < found["full"].seconds
    assert found["none"].memory_bytes > found["selective"].memory_bytes > found["full"].memory_bytes
    full = found["full"].layout
    assert memory(asked, replace(full, offload=True)).total < found["full"].memory_bytes
    assert memory(asked, replace(full, loss="chunked")).total < found["full"].memory_bytes


def test_adapters_of_frozen_matrices_need_neither_gradients_nor_states():
    """Peak memory of torchtune's README, with LoRA and with QLoRA, in GiB."""
    run = of_row(TUNE | {"strategy": "single, LoRA", "micro_batch": "2"})
    assert run.layout.trained == "lora" and run.layout.loss == "chunked"
    every, lora, qlora = (estimate(run.training, replace(run.layout, trained=how)) for how in ("all", "lora", "qlora"))
    assert lora.memory.states.gradients == lora.memory.states.optimizer == 0
    assert lora.memory_bytes / 2**30 == pytest.approx(8.5, rel=0.1)
    assert qlora.memory_bytes / 2**30 == pytest.approx(4.6, rel=0.1)
    assert 0.7 < lora.seconds / every.seconds < 0.9


def test_ranges_hold_the_estimate_and_are_wider_where_less_is_known():
    def width(layout, machine="h100x8-efa"):
        asked = replace(of_row(PLAYBOOK).training, devices=layout.devices)
        found = estimate(asked, layout)
        for name, (least, most) in found.ranges.items():
            assert least < getattr(found, name) < most
        return found.ranges["seconds"][1] / found.ranges["seconds"][0]

    known = width(playbook(tensor=2, data=4))
    assert known < width(playbook(tensor=2, data=4, pipeline=2)) < width(playbook(tensor=2, data=4, pipeline=16))
    assert known < width(playbook(tensor=16))
    assert known * exp(0.2) < width(playbook(tensor=2, data=4, framework=FRAMEWORKS["olmo"]))


# ---- one layout, and a machine


def test_a_layout_by_name_has_figures_with_ranges_parts_and_near_runs(capsys):
    text = "dp=8,tp=4,pp=2,cp=1,zero=1,micro_batch=2,schedule=1f1b,recompute=selective,compile=true,precision=bf16"
    found = advise("7B", layout=text, devices=64, batch=512, sequence=2048).to_json()
    assert found["source"] == "modelled" and found["title"] == "ZeRO-1 8 × TP 4 × PP 2"
    assert sum(found["seconds"].values()) == pytest.approx(found["seconds_per_step"])
    for name in ("seconds", "tokens_per_second_per_gpu", "mfu", "memory_bytes"):
        least, most = found["ranges"][name]
        assert 0 < least < most
    assert found["micro_batches"] == 512 // 16 and found["nearest"]
    as_dict = advise("7B", layout={"dp": 8, "tp": 4, "pp": 2, "zero": 1, "micro_batch": 2}, batch=512, sequence=2048)
    assert as_dict.estimate.training.devices == 64
    assert "80 % range" in repr(as_dict) and as_dict._repr_html_().count("<table>") == 3
    assert called("advise", "--params", "7B", "--layout", "dp=8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"] == 8
    assert called("advise", "--params", "7B", "--layout", "dp=8,sharding=ddp") == 0
    assert "It does not fit" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=8,banana=2", "a field of layout must be one of dp, tp, pp, cp"),
        ("dp=x", "layout: dp must be an integer from 1"),
        ("dp=8,ep=2", "mixtures of experts are not modelled"),
        ("dp=4", "layout has 4 devices (dp 4), got devices 8"),
        ("tp=8,dp=1,recompute=some", "recompute must be one of none, selective, full"),
        ("dp=8,zero=1,sharding=fsdp", "zero and sharding say the same"),
        ("dp=8,micro_batch=3", "batch must be a multiple of dp × micro_batch, 24, got 64"),
        ("dp=8,micro_batches=3", "layout has 24 samples per step, got a batch of 64"),
        ("dp=8,offload=true", "needs recompute=full"),
        ("dp=4,pp=2,chunks=2,schedule=1f1b", "chunks need schedule=interleaved"),
        ("dp=8,sharding=hsdp", "hsdp needs several nodes"),
        ("pp=8,framework=nanotron,micro_batch=16", "needs at least 7 micro-batches in nanotron, got 4"),
        ("dp=8,precision=int4", "must be one of"),
    ],
)
def test_an_impossible_layout_is_refused_in_a_sentence(layout, said, capsys):
    assert called("advise", "--params", "7B", "--devices", "8", "--batch", "64", "--layout", layout) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_every_field_of_a_layout_is_read():
    given = {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "sharding": "fsdp", "micro_batch": 2, "micro_batches": 4}
    given |= {"schedule": "interleaved", "chunks": 4, "recompute": "full", "compile": False, "precision": "fp16"}
    given |= {"framework": "torchtitan", "async_tp": True, "loss": "chunked", "offload": True, "trained": "lora"}
    assert given.keys() | {"zero"} == set(FIELDS)
    asked, layout = laid(given, params="7B")
    assert (layout.data, layout.tensor, layout.pipeline, layout.context) == (2, 2, 2, 2)
    assert (layout.shards, layout.micro_batch, layout.micro_batches, layout.chunks) == (4, 2, 4, 4)
    assert (layout.recompute, layout.compiled, layout.asynchronous) == ("full", False, True)
    assert (layout.loss, layout.offload, layout.trained) == ("chunked", True, "lora")
    assert layout.framework.name == "torchtitan"
    assert asked.precision == "fp16" and asked.batch == 16 and asked.devices == 16


def test_a_check_prints_a_table_and_one_json_object(tmp_path, capsys):
    rows = [*variants(lambda speed, place: speed), PLAYBOOK | {"seq": ""}]
    path = write(tmp_path / "runs.csv", rows)
    assert called("advise", "--check", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["rank_correlation"] == pytest.approx(1)
    assert found["not_computed"] == [
        {
            "line": 7,
            "source": "HF Ultra-Scale Playbook",
            "title": "nanotron Llama 1B",
            "reason": "the length of a sequence is not said",
        }
    ]
    assert called("advise", "--check", str(path)) == 0
    assert "5 of 6 rows" in capsys.readouterr().out
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for arguments, said in (
        ([str(tmp_path / "none.csv")], "cannot be read"),
        ([str(tmp_path / "other.csv")], "has no row with the columns source, model"),
        ([str(path), "--params", "7B"], "takes no other argument"),
    ):
        assert called("advise", "--check", *arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert said in line


def test_a_machine_of_a_file_changes_a_row(tmp_path):
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"like": "h100x8", "per_node": 4, "between_gb_per_s": 50, "oversubscription": 2}))
    ours = machine_of(str(path))
    assert ours.per_node == 4 and ours.between.simple.bandwidth == 25e9 and ours.accelerator.memory == 81_559 << 20
    path.write_text(json.dumps({"like": "h100x8", "tflops": {"bf16": 100}, "memory_gib": 10, "memory_gb_per_s": 1000}))
    slow = advise("7B", layout="dp=8", machine=path).to_json()
    fast = advise("7B", layout="dp=8").to_json()
    assert slow["seconds_per_step"] > 5 * fast["seconds_per_step"] and fast["fits"] and not slow["fits"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[1]", "must be a JSON object"),
        ("{}", "like must be one of t4x2"),
        ('{"like": "here"}', "like must be one of t4x2"),
        ('{"like": "l4", "nodes": 2}', "'nodes' is not one of like, name, tflops"),
        ('{"like": "l4", "per_node": 0}', "per_node must be an integer from 1"),
        ('{"like": "l4", "tflops": 7}', "tflops must be an object"),
        ('{"like": "t4x2", "tflops": {"bf16": 7}}', "tflops must be one of fp32, fp16"),
    ],
)
def test_a_bad_machine_is_refused_in_a_sentence(tmp_path, written, said):
    path = tmp_path / "ours.json"
    path.write_text(written)
    with pytest.raises(ValueError, match=said):
        machine_of(path)
    with pytest.raises(ValueError, match="cannot be read"):
        machine_of(tmp_path / "none.json")


@pytest.mark.thorough
def test_every_machine_advises(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for name, row in DEVICES.items():
        if row.accelerator:
            found = advise(config=path, machine=name, devices=row.per_node, batch=8 * row.per_node)
            assert found.rows or found.misfits, name
