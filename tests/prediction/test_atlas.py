"""The atlas of published runs: the data, what is near a layout, and how it is displayed."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from commands import called

from labkit import advise, atlas, pictures
from labkit.figures.advice import ROWS
from labkit.figures.atlas import BY, FAILED, Atlas, evidence_cells
from labkit.prediction.scale.advice import advice, training
from labkit.prediction.scale.atlas import (
    NEAR,
    RUNS,
    case,
    degrees_of,
    evidence,
    failed,
    key_of,
    matches,
    modelled,
    published,
    select,
    speed,
)

PLAYBOOK = "HF Ultra-Scale Playbook"


def rows() -> list[dict[str, str]]:
    with gzip.open(RUNS, "rt", encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


# ---- the data


def test_the_file_is_small_and_every_row_has_its_source():
    assert RUNS.stat().st_size <= 300_000
    found = rows()
    assert len(found) > 1500 and all(row["source"] and row["where"] for row in found)
    assert sum("OOM" in row["memory_gib"] for row in found) > 500
    for row in found:
        assert any(row[name] for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_percent", "step_seconds")) or (
            row["memory_gib"] or row["micro_batch"]
        ), row


def test_every_row_is_read_or_refused_with_a_reason():
    found, refused = published()
    in_file = rows()
    assert len(found) + len(refused) == len(in_file)
    assert {run.line for run in found}.isdisjoint(row.line for row in refused)
    assert len(refused) < 0.05 * len(in_file) and all(row.reason for row in refused)
    for run in found:
        row = in_file[run.line - 2]
        assert (run.source, run.title, run.where) == (row["source"], row["model"], row["where"])
        assert run.training.devices == int(row["gpus"])
        assert failed(run) == ("OOM" in row["memory_gib"])
        if failed(run):
            assert speed(run) is None and run.measured.memory is None
        elif row["memory_gib"]:
            assert run.measured.memory == pytest.approx(float(row["memory_gib"]) * 2**30)
        if row["tokens_per_s_per_gpu"]:
            assert speed(run) == float(row["tokens_per_s_per_gpu"])
        degrees = run.layout.tensor, run.layout.pipeline, run.layout.data
        assert math.prod(degrees) * run.layout.context == run.training.devices
        assert all(int(row[name]) == degree for name, degree in zip(("tp", "pp", "dp"), degrees) if row[name])


@pytest.mark.thorough
def test_the_same_file_can_be_checked_against_the_model(capsys):
    assert called("advise", "--check", str(RUNS)) == 0
    assert PLAYBOOK in capsys.readouterr().out


# ---- some of the runs


def test_runs_are_selected_by_name_number_and_degrees():
    for run in select(model="8B", gpus=64, layout="tp=2,zero=1"):
        assert "8B" in run.title and run.training.devices == 64 and run.layout.tensor == 2
        assert run.layout.sharding.name == "zero1"
    assert {run.title for run in select(model="3B")}.isdisjoint({"mpt-13b"})
    assert {run.training.devices for run in select(gpus=[8, 512])} == {8, 512}
    assert {run.source for run in select(source="playbook")} == {PLAYBOOK}
    assert all("A100" in run.training.accelerator.name for run in select(gpu_type="a100"))
    assert select() == published()[0]


def test_degrees_are_read_from_a_text_or_a_mapping():
    assert degrees_of("dp=8, tp=4") == degrees_of({"dp": 8, "tp": 4}) == {"dp": 8, "tp": 4}
    [first, *_] = select(layout="dp=8,tp=4")
    assert matches(first.layout, {"dp": 8, "tp": 4}) and not matches(first.layout, {"dp": 4})


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"model": "9B"}, "no published run has the model '9B'; there are "),
        ({"gpus": 3}, "no published run has the number of GPUs '3'; there are "),
        ({"gpus": 0}, "gpus must be an integer from 1"),
        ({"gpus": "many"}, "gpus must be an integer from 1"),
        ({"gpu_type": 80}, "GPU type must be a part of a name, got 80"),
        ({"model": ""}, "model must be a part of a name, got ''"),
        ({"layout": "rows=3"}, "layout has dp, tp, pp, cp, zero, micro_batch, such as "),
        ({"layout": "tp=two"}, "tp of the layout must be an integer"),
        ({"layout": ""}, "layout must have at least one of dp"),
        ({"layout": 8}, "layout must be a text such as "),
        ({"model": "8B", "gpus": 64, "layout": "tp=64"}, "no published run has the layout 'tp=64'"),
    ],
)
def test_what_does_not_exist_is_refused_in_a_sentence(wanted, words):
    with pytest.raises((LookupError, ValueError, TypeError), match="^" + words.replace("(", r"\(")) as caught:
        atlas(**wanted)
    assert "\n" not in str(caught.value)


# ---- a case


def test_the_layouts_of_a_case_are_ranked_by_the_median_of_their_runs():
    there = case("nanotron Llama 8B", 256)
    speeds = [found for found, _ in there.ranked]
    assert speeds == sorted(speeds, reverse=True)
    keys = [key_of(run.layout) for _, run in there.ranked]
    assert len(set(keys)) == len(keys)
    repeated = [run for _, run in there.ranked if len(there.same(run)) > 1]
    assert repeated, "the source has repetitions"
    for run in repeated:
        measured = [found for found in map(speed, there.same(run)) if found is not None]
        assert min(measured) <= there.speed(there.same(run)) <= max(measured)
    ran = sum(speed(run) is not None for run in there.runs)
    assert ran + len(there.failures) == len(there.runs)


def test_a_case_is_one_training():
    with pytest.raises(LookupError, match="is more than one training: "):
        case("8B", 8)
    layout = case("nanotron Llama 8B", 64).layout({"dp": 8, "tp": 4, "pp": 2, "cp": 1, "zero": 1, "micro_batch": 4})
    assert layout.title == "ZeRO-1 8 × TP 4 × PP 2" and layout.micro_batches == 8 and layout.devices == 64


# ---- evidence


@pytest.mark.parametrize("number", range(0, 1500, 171))
def test_a_published_run_is_its_own_nearest_evidence(number):
    run = published()[0][number]
    [nearest, *more] = evidence(run.training, run.layout, 5)
    assert nearest.distance == 0 and nearest.near and not nearest.differences
    assert nearest.run is run or key_of(nearest.run.layout) == key_of(run.layout)
    assert [one.distance for one in more] == sorted(one.distance for one in more)


def test_each_difference_adds_to_the_distance_and_is_named():
    run = next(run for run in select(model="nanotron Llama 8B", gpus=64, layout="tp=2,zero=1") if speed(run))
    only = (run,)

    def difference(training=run.training, **changed):
        [found] = evidence(training, replace(run.layout, **changed), 1, only)
        return found.distance, found.differences

    assert difference(tensor=8) == (2.0, ("TP 2 instead of 8",))
    assert difference(pipeline=2 * run.layout.pipeline)[0] == 1.0
    assert difference(micro_batches=4 * run.layout.micro_batches)[0] == 1.0
    assert difference(recompute="full") == (1.0, ("none instead of full recomputation",))
    assert difference(replace(run.training, devices=128)) == (1.0, ("64 instead of 128 GPUs",))
    other = training("7B", devices=64, machine="a100x8").accelerator
    far, words = difference(replace(run.training, accelerator=other))
    assert far == 2.0 and words == (f"{run.training.accelerator.name} instead of {other.name}",)


def test_sharding_counts_by_the_kinds_of_states():
    asked = training("7B", devices=64)
    by_kind = {one.layout.kind: one.layout for one in advice(asked).ranked}
    run = next(run for run in select(model="nanotron Llama 8B", gpus=64, layout="tp=2,pp=1,zero=1") if speed(run))
    far = {kind: evidence(asked, by_kind[kind], 1, (run,))[0] for kind in ("ZeRO-1", "ZeRO-2", "FSDP")}
    assert "ZeRO-1 instead of FSDP" in far["FSDP"].differences
    for found in far.values():
        assert not any(words.startswith("ZeRO-1 instead of ZeRO-1") for words in found.differences)


def test_where_nothing_is_near_the_cells_say_so():
    asked = training("1000B", devices=8192, sequence=4096)
    [best, *_] = advice(asked).ranked
    [nearest] = evidence(asked, best.layout, 1)
    assert not nearest.near and nearest.distance > NEAR
    cells = evidence_cells(best.layout.title, 1.0, 2.0**30, nearest)
    assert cells[2] == cells[4] == "none near" and f"{nearest.distance:.1f}" in cells[-1]


def test_advice_shows_the_nearest_run_next_to_each_figure():
    found = advise("8B", devices=64, sequence=4096, batch=256)
    assert len(found.evidence) == min(len(found.advice.ranked), ROWS) + len(found.misfits)
    assert any(row[2] not in ("none near", FAILED) for row in found.evidence)
    assert "nearest published run" in repr(found) and "nearest published run" in found._repr_html_()
    document = json.loads(json.dumps(found.to_json()))
    for one in (*document["fits"], *document["does_not_fit"]):
        assert one["evidence"]["near"] == (one["evidence"]["distance"] <= NEAR)
        assert one["evidence"]["run"]["where"]


# ---- display


def test_the_table_has_the_fastest_first_and_the_failures_last():
    found = atlas(model="nanotron Llama 8B", gpus=64)
    speeds = [speed(run) for run in found.runs]
    ran = [each for each in speeds if each is not None]
    assert ran == sorted(ran, reverse=True) and None not in speeds[: len(ran)]
    ((_, rows),) = found.tables()
    ((_, every),) = Atlas(found.runs, limit=len(found.runs)).tables()
    assert len(rows) == 30 and len(every) == len(found.runs) > 100
    assert every[-1][5] == FAILED
    assert f"{len(found.runs) - 30} more runs." in repr(found)
    assert found._repr_html_().count("<tr>") == 31
    assert "published runs" in found.title and str(sum(map(failed, found.runs))) in found.title
    assert "256 samples of 4,096 tokens per step" in found.question
    with pytest.raises(ValueError, match="must be of one model, batch and number of GPUs"):
        _ = atlas(model="nanotron Llama 8B").question


def test_json_has_every_run_with_what_was_measured_and_what_is_modelled():
    document = json.loads(json.dumps(atlas(model="nanotron Llama 8B", gpus=64).to_json()))
    assert len(document["runs"]) > 100
    for run in document["runs"]:
        assert run["source"] == PLAYBOOK and run["where"]
        assert run["failed"] == (run["measured"]["tokens_per_second_per_gpu"] is None)
        assert run["modelled"]["tokens_per_second_per_gpu"] > 0 and run["modelled"]["memory_bytes"] > 0


@pytest.mark.parametrize("by", BY)
def test_the_picture_has_one_dot_per_run_in_each_panel(by):
    runs = select(source="Playbook", gpus=[64, 256])
    figure = pictures.atlas(by=by, source="Playbook", gpus=[64, 256])
    dots = Counter()
    for trace in figure.data:
        dots[trace.yaxis] += len(trace.x)
        assert len(trace.x) == len(trace.y) == len(trace.text)
        assert all(math.isfinite(value) for value in (*trace.x, *trace.y))
    ran, dead = sum(speed(run) is not None for run in runs), sum(map(failed, runs))
    assert dots == {"y": ran, "y5": ran, "y2": dead, "y4": dead, "y3": sum(bool(r.measured.memory) for r in runs)}
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert len(shown) == len(set(shown)) <= 8
    assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_a_picture_of_something_else_is_refused():
    with pytest.raises(ValueError, match="by must be one of model, tp, pp, sharding, gpus, source, got 'layers'"):
        pictures.atlas(by="layers")
    with pytest.raises(LookupError, match="no published run has the model '9B'"):
        pictures.atlas(model="9B")


def test_dots_are_where_the_figures_say():
    [run] = select(model="nanotron Llama 8B", gpus=64, layout="dp=32,tp=2,pp=1,zero=1,micro_batch=2")
    figure = Atlas([run]).figure()
    at = {trace.yaxis: (trace.x[0], trace.y[0]) for trace in figure.data if len(trace.x)}
    assert at["y"] == (0, speed(run)) and figure.layout.xaxis.ticktext == ("64",)
    expected = modelled(run)
    assert at["y5"] == pytest.approx((expected.tokens_per_second_per_gpu, speed(run)), rel=1e-5)
    assert at["y3"] == pytest.approx((expected.memory_bytes / 2**30, run.measured.memory / 2**30), rel=1e-5)


def test_names_are_escaped_in_every_display():
    [run] = select(model="nanotron Llama 8B", gpus=64, layout="dp=32,tp=2,pp=1,zero=1,micro_batch=2")
    odd = Atlas([replace(run, title="<b>x</b>", source="<i>y</i>")])
    assert "<b>x" not in odd._repr_html_() and "<b>x" not in odd.page() and "<i>y" not in odd.figure().to_json()


# ---- the command


def test_the_command_prints_a_table_or_one_json_object_or_writes_a_page(capsys, tmp_path):
    asked = ["atlas", "--model", "nanotron Llama 8B", "--gpus", "64, 256", "--layout", "tp=2"]
    assert called(*asked, "--limit", "5") == 0
    out = capsys.readouterr().out
    assert "tokens/s per GPU" in out and "more runs." in out and PLAYBOOK in out
    assert called(*asked, "--json") == 0
    assert {run["tensor"] for run in json.loads(capsys.readouterr().out)["runs"]} == {2}
    page = tmp_path / "atlas.html"
    assert called(*asked, "-o", str(page), "--by", "pp") == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "Plotly.newPlot" in text and 'src="http' not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "9B"], "no published run has the model '9B'"),
        (["--gpus", "x"], "gpus must be an integer from 1 to"),
        (["--layout", "tp"], "tp of the layout must be an integer"),
        (["--by", "tp"], "--by colours the chart; add -o FILE.html, or remove --by"),
        (["-o", "x.html", "--by", "colour"], "by must be one of model, tp, pp, sharding, gpus, source, got 'colour'"),
        (["-o", "nowhere/x.html"], "nowhere/x.html cannot be written: No such file or directory"),
        (["--limit", "0"], "--limit must be an integer from 1"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments, words, capsys):
    assert called("atlas", *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
