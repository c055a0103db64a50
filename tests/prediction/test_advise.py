"""Advice and scaling: what fits and what does not, the front ends, and invalid arguments."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest
from commands import called
from decoders import GPT2, LLAMA

import labkit
from labkit import SpecError, advise
from labkit.figures.advice import Advised, in_seconds
from labkit.prediction.devices import ACCELERATED
from labkit.prediction.scale.advice import advice, efficiency, fastest, scaling, training, verdict
from labkit.prediction.scale.layouts import SHARDINGS, Layout, layouts
from labkit.prediction.scale.step import memory


@pytest.fixture
def config(tmp_path):
    def write(said: object) -> str:
        (tmp_path / "config.json").write_text(said if isinstance(said, str) else json.dumps(said))
        return str(tmp_path / "config.json")

    return write


# ---- advice


def test_every_layout_uses_all_devices_and_respects_the_limits():
    asked = training("70B", devices=4096)
    found = [*layouts(asked.model, asked.machine, 4096, asked.sequence)]
    assert len({*found}) == len(found) > 500
    for one in found:
        assert one.devices == 4096 and one.tensor <= 8 and one.pipeline <= 80
        assert one.synced % one.shards == 0 and one.replicas * one.shards == one.synced
        assert asked.model.heads % one.tensor == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "batch"), [(4096, 4096), (4096, 512), (64, 256), (24, 96)])
def test_what_fits_is_ranked_and_what_does_not_fit_says_what_is_missing(devices, batch):
    asked = training("70B", devices=devices, batch=batch)
    found = advice(asked)
    assert found.fitting
    times = [one.seconds for one in found.fitting]
    assert times == sorted(times)
    for one in found.fitting:
        layout = one.layout
        assert one.memory.total <= asked.usable
        assert layout.micro_batch * layout.micro_batches * layout.data == batch
        if layout.recompute != "none":
            without = replace(layout, recompute="none")
            assert memory(asked, without).total > asked.usable
    kinds = {one.layout.kind for one in found.fitting}
    for miss in found.misfits:
        assert miss.layout.kind not in kinds
        assert memory(asked, miss.layout).total == miss.memory.total > asked.usable
        assert miss.missing == miss.memory.total - asked.usable
        assert fastest(asked, replace(miss.layout, recompute="none")) is None
        assert miss.change in [one.layout for one in found.fitting] and miss.words
    for kind, multiple in found.too_small.items():
        assert kind not in kinds and batch % multiple


def test_recomputation_and_smaller_micro_batches_are_chosen_when_memory_is_scarce():
    plenty = training("7B", devices=8, machine="a100x8")
    scarce = replace(plenty, memory=30 << 30)
    mesh = Layout(SHARDINGS["fsdp"], 8, 8)
    many, few = fastest(plenty, mesh), fastest(scarce, mesh)
    assert many and few
    assert many.layout.recompute == "none" and few.layout.recompute == "full"
    assert few.seconds > 1.3 * many.seconds


@pytest.mark.thorough
def test_the_common_rule_is_compared_with_the_estimates():
    agrees = verdict(advice(training("7B", devices=8)))
    assert agrees and agrees.chosen and agrees.passed == ("DDP",) and agrees.agrees
    assert agrees.chosen.layout.kind == "FSDP"
    misled = verdict(advice(training("70B", devices=4096)))
    assert misled and misled.chosen and not misled.agrees
    part, seconds = misled.difference
    assert 0 < seconds <= misled.chosen.parts[part]
    small = advice(training("70B", devices=4096, batch=512))
    late = verdict(small)
    assert late and "FSDP" in late.passed and small.too_small["FSDP"] == 4096
    assert verdict(advice(training("125M", devices=1))) is None
    said = "\n".join(Advised(small).sentences)
    assert "FSDP is not possible: the batch of 512 is not a multiple of 4,096 samples" in said


def test_nothing_fits_names_the_missing_bytes_and_the_devices_that_would_do():
    found = advise("70B", devices=8, machine="a100x8", memory="16GB")
    assert not found.rows and found.misfits
    [said] = [sentence for sentence in found.sentences if sentence.startswith("Nothing fits")]
    more = int(said.partition("it fits on ")[2].partition(" ")[0])
    assert advise("70B", devices=more, batch=max(512, more), machine="a100x8", memory="16GB").rows
    assert not advise("70B", devices=more // 2, machine="a100x8", memory="16GB").rows
    lost = advise("70B", devices=1, machine="t4x2").sentences[0]
    assert lost.endswith("no number of these devices is enough, use more memory each.")


# ---- scaling


def test_scaling_has_a_series_per_strategy_and_the_point_of_communication():
    asked = training("1.3B", devices=64, batch=64, sequence=2048)
    several = scaling(asked, most=256)
    weak, strong = ([one for one in several if one.mode == mode] for mode in ("weak", "strong"))
    assert [one.kind for one in weak] == [one.kind for one in strong]
    for one in several:
        assert one.devices == (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for devices, each in zip(one.devices, one.estimates):
            if each:
                assert each.training.devices == devices and 0 < efficiency(each) <= 1
                assert each.training.batch == (64 if one.mode == "strong" else devices)
        if one.bound_from:
            after = one.estimates[one.devices.index(one.bound_from) :]
            assert all(each is None or each.communication_bound for each in after)
    ddp = next(one for one in strong if one.kind == "DDP")
    assert ddp.estimates[0] and ddp.estimates[6] and ddp.estimates[7] is None  # 64 samples for 128 devices
    assert efficiency(ddp.estimates[6]) < efficiency(ddp.estimates[0])


# ---- front ends


def test_python_returns_tables_that_escape_figures_and_json(config):
    found = advise(config=config(LLAMA | {"model_type": "<b>x"}), machine="a100x8")
    assert "<b>" not in found._repr_html_() and found._repr_html_().count("<table>") == 3
    assert found.rows[0][0] in repr(found) and "modelled" in repr(found)
    assert found.figure().data[0].name == "computation"
    assert found.svg().startswith("<svg")
    document = json.loads(json.dumps(found.to_json()))
    assert document["source"] == "modelled" and document["model"]["parameters"] == 6_738_415_616
    best = document["fits"][0]
    assert sum(best["seconds"].values()) == pytest.approx(best["seconds_per_step"])
    assert math.prod(best[name] for name in ("data", "tensor", "pipeline", "context")) == document["devices"] == 8


def test_scaling_is_drawn_as_plotly_and_svg():
    scaled = advise("350M", machine="t4x2", batch=8, sequence=512).scaling()
    weak = next(chart for chart in scaled.charts() if chart.name == "weak-efficiency")
    assert weak.x.categories == ("1", "2") and "modelled" in weak.note
    figure = scaled.figure()
    assert {"1", "2"} <= {x for trace in figure.data for x in trace.x}
    assert ">2</text>" in scaled.svg()
    assert "communication-bound from" in repr(scaled) and scaled._repr_html_().count("<table>") == 6
    [efficient, exposed, times, *_] = ({row[0]: row[1] for row in rows} for _, rows in scaled.tables())
    alone = next(one for one in scaled.series if one.kind == "DDP").estimates[0]
    assert alone and efficient["DDP"] == f"{efficiency(alone):.0%}" and exposed["DDP"] == "0%"
    assert times["DDP"] == in_seconds(alone.seconds)


def test_command_prints_tables_and_one_json_object(capsys, config):
    asked = ["advise", "--config", config(GPT2), "--machine", "a100x8", "--batch", "64"]
    assert called(*asked) == 0
    out = capsys.readouterr().out
    assert "DDP 8" in out and "The common rule" in out and "Assumed: 81%" in out
    assert called(*asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["batch"] == 64
    assert called("advise", "--workload", "gpt", "--option", "size=1B", "--machine", "t4x2", "--scaling", "--json") == 0
    assert json.loads(capsys.readouterr().out)["series"]
    assert called("advise", "--params", "1B", "--machine", "t4x2", "--scaling") == 0
    assert "weak scaling: efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "describe the model by one of params (such as 7B), config (a config.json) or workload (such as gpt)"),
        (["--params", "7B", "--workload", "gpt"], "got params and workload"),
        (["--params", "seven"], "--params must be a number of parameters such as 7B or 124M, got 'seven'"),
        (["--params", "1M"], "--params must be a number from 1.25e+08 to 4e+12"),
        (["--workload", "cnn"], "--workload must be one of gpt, got 'cnn'"),
        (["--workload", "gpt", "--option", "size=9B"], "got '9B'"),
        (["--params", "7B", "--option", "size=1B"], "options apply only to a workload"),
        (["--params", "7B", "--machine", "v100"], f"--machine must be one of {', '.join(ACCELERATED)}, got 'v100'"),
        (["--params", "7B", "--devices", "12"], "--devices must be whole nodes, a multiple of 8 on h100x8"),
        (["--params", "7B", "--devices", "x"], "--devices must be an integer from 1 to 65536, got 'x'"),
        (["--params", "7B", "--machine", "t4x2", "--devices", "4"], "--devices must be at most 2 on t4x2"),
        (["--params", "7B", "--memory", "24"], "--memory must be a size such as 24GB or 24GiB, got '24'"),
        (["--params", "7B", "--batch", "much"], "--batch must be a number of samples such as 1024"),
        (["--params", "7B", "--batch", "0"], "--batch (samples) must be an integer from 1"),
        (["--params", "7B", "--batch", "100 tokens"], "--batch must have at least one sample of 4096 tokens"),
        (["--params", "7B", "--sequence", "0"], "--sequence must be an integer from 1"),
        (["--workload", "gpt", "--sequence", "4096"], "--sequence must be at most 128, the positions of gpt"),
        (["--params", "7B", "--machine", "t4x2", "--precision", "bf16"], "must be one of fp32, fp16, got 'bf16'"),
        (["--params", "7B", "--attention", "flash"], "--attention must be one of fused, eager, got 'flash'"),
    ],
)
def test_what_is_not_possible_is_refused_in_a_sentence(arguments, said, capsys):
    assert called("advise", *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "must be a JSON object"),
        ({}, "has no num_hidden_layers"),
        (LLAMA | {"hidden_size": -1}, "hidden_size must be an integer from 1"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size must be an integer from 1"),
        (LLAMA | {"num_attention_heads": 33}, "must be a multiple of the number of heads 33"),
        (LLAMA | {"num_key_value_heads": 5}, "must be a multiple of num_key_value_heads 5"),
        (LLAMA | {"num_local_experts": 8}, "describes a mixture of experts"),
    ],
)
def test_a_bad_config_is_refused_in_a_sentence(config, written, said):
    with pytest.raises(ValueError, match=said) as caught:
        advise(config=config(written))
    assert "\n" not in str(caught.value)


def test_the_text_model_of_a_model_with_images_is_found(config):
    nested = advise(config=config({"model_type": "vision", "text_config": LLAMA})).to_json()["model"]
    assert nested["parameters"] == 6_738_415_616


def test_a_folder_stands_for_its_config(config, tmp_path):
    config(LLAMA)
    assert advise(config=tmp_path).to_json()["model"]["layers"] == 32
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a file"):
        advise(config=tmp_path / "pipe")
    with pytest.raises(ValueError, match="cannot be read"):
        advise(config=tmp_path / "nothing.json")
    with pytest.raises(SpecError, match="size must be one of"):
        labkit.advise(workload="gpt", options={"size": "2B"})
