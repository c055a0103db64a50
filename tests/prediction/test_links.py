"""How long collectives take: formulas for named machines, tables of this one, and their files; and from how many tokens
per device on computation can hide them, by the closed formulas of the scaling book, where links have no latency."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from linked import MACHINE, table
from linked import cache as cache
from msgspec.structs import replace

from labkit.analysis.theory.collectives import all_gather, all_reduce, all_to_all, bus_factor, reduce_scatter
from labkit.prediction import links
from labkit.prediction.devices import DEVICES, HERE, Rate, device
from labkit.prediction.links import (
    ALGORITHMS,
    OPERATIONS,
    Balance,
    Measured,
    Modelled,
    communication,
    measured,
    store,
    stored,
    tables_in_words,
)
from labkit.setup.machine import Gpu

NAMED = [name for name in DEVICES if name != HERE]
MIB = 1 << 20


# ---- algorithms


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_on_one_node_the_first_algorithm_carries_what_bus_bandwidth_assumes(ranks):
    for operation in OPERATIONS:
        load = next(iter(ALGORITHMS[operation].values()))(ranks, 1)
        assert load.inside == pytest.approx(bus_factor(operation, ranks))
        assert (load.far, load.between) == (0, 0.0)


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_loads_are_those_of_the_messages_of_the_algorithm(ranks):
    plans = {
        "all_reduce": all_reduce(ranks),
        "all_gather": all_gather(ranks),
        "reduce_scatter": reduce_scatter(ranks),
        "all_to_all": all_to_all(ranks),
    }
    for operation, plan in plans.items():
        load = next(iter(ALGORITHMS[operation].values()))(ranks, 1)
        assert (load.near, load.inside) == (len(plan.rounds), pytest.approx(plan.busiest())), operation


def test_a_ring_over_nodes_has_one_path_through_each_network_adapter():
    load = ALGORITHMS["all_reduce"]["ring"](16, 2)
    assert (load.near, load.far) == (28, 2)
    assert load.between == pytest.approx(bus_factor("all_reduce", 16) / 8)
    alone = ALGORITHMS["all_reduce"]["ring"](4, 4)  # one rank per node: nothing passes inside a node
    assert (alone.near, alone.far, alone.inside, alone.between) == (0, 6, 0.0, 1.5)


def test_in_an_all_to_all_most_chunks_leave_the_node():
    load = ALGORITHMS["all_to_all"]["direct"](16, 2)
    assert (load.near, load.far, load.inside, load.between) == (7, 8, 7 / 16, 8 / 16)


# ---- named machines


@pytest.mark.parametrize("name", NAMED)
def test_large_messages_reach_the_bandwidth_of_the_link_and_small_ones_cost_hops(name):
    machine, model = device(name), communication(name)
    for operation in OPERATIONS:
        ranks, size = machine.per_node, 1 << 36
        bus = bus_factor(operation, ranks) * size / model.seconds(operation, size, ranks)
        assert bus == pytest.approx(machine.inside.simple.bandwidth, rel=0.01)
        assert 5e-6 < model.seconds(operation, 0, ranks) < 50e-6 * max(1, ranks / 8)
        assert model.time(operation, 0, ranks).source == "modelled"


def test_between_nodes_a_tree_wins_for_small_messages_and_a_ring_for_large_ones():
    model = communication("h100x8")
    assert model.time("all_reduce", 1024, 512, nodes=64).algorithm == "tree"
    assert model.time("all_reduce", 1 << 34, 512, nodes=64).algorithm == "ring"
    # one rank per node has one network adapter, eight have eight
    one, eight = (
        bus_factor("all_reduce", n) * (1 << 34) / model.seconds("all_reduce", 1 << 34, n, nodes=8) for n in (8, 64)
    )
    inside = device("h100x8").inside.simple.bandwidth
    assert one == pytest.approx(50e9, rel=0.01) and eight == pytest.approx(inside, rel=0.05)


def test_times_grow_with_size_ranks_and_nodes():
    model = communication("a100x8")
    for operation in OPERATIONS:
        times = [model.seconds(operation, size, 8) for size in (0, 1024, MIB, 64 * MIB, 1 << 30)]
        assert times == sorted(times) and times[0] < times[-1]
    assert model.seconds("all_reduce", MIB, 8) < model.seconds("all_reduce", MIB, 16, nodes=2)
    assert model.seconds("all_reduce", MIB, 1) == 0.0
    assert model.seconds("recv", MIB, 2) == model.seconds("send", MIB, 2) < model.seconds("send", MIB, 2, nodes=2)


COLLECTIVES = {"all_reduce": "ALL_REDUCE", "all_gather": "ALL_GATHER", "reduce_scatter": "REDUCE_SCATTER"}


@pytest.mark.parametrize(("operation", "theirs"), COLLECTIVES.items())
def test_eight_a100_agree_with_the_tuning_model_in_torch(monkeypatch, operation, theirs):
    analysis = pytest.importorskip("torch._inductor.comm_analysis")
    if not hasattr(analysis, "estimate_nccl_collective_runtime_impl"):
        pytest.skip("this torch has no model that needs no graph")
    monkeypatch.setattr(analysis, "get_gpu_type", lambda: analysis.NVIDIA_GPU_TYPE.AMPERE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ours = communication("a100x8")
    for power in range(10, 31):
        collective = analysis.NCCL_COLL[theirs]
        seconds = analysis.estimate_nccl_collective_runtime_impl(1 << power, 8, collective) / 1000
        assert ours.seconds(operation, 1 << power, 8) == pytest.approx(seconds, rel=0.02)


def test_figures_name_their_sources():
    for name in NAMED:
        machine = device(name)
        assert machine.inside.source
        assert machine.between is None or machine.between.source


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("all_redduce", 1, 2), "operation must be one of all_reduce, all_gather, reduce_scatter, broadcast"),
        (("all_reduce", -1, 2), "size must be an integer from 0"),
        (("all_reduce", 1, 0), "ranks must be an integer from 1"),
        (("all_reduce", 1, 9, 2), "ranks must be a multiple of nodes, got 9 ranks on 2 nodes"),
    ],
)
def test_invalid_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        communication("a100x8").time(*arguments)


def test_links_that_a_machine_does_not_have():
    with pytest.raises(LookupError, match=r"has 8 accelerators per node, got 16 ranks on 1 nodes"):
        communication("a100x8").time("all_reduce", 1, 16)
    with pytest.raises(LookupError, match=r"2 × T4 with PCIe is one node, got nodes=2"):
        communication("t4x2").time("all_reduce", 1, 4, nodes=2)


def test_unknown_machine_names_those_there_are(cache):
    with pytest.raises(ValueError, match=r"device must be one of here, t4x2, a100x8, h100x8, .*, got 'v100'"):
        communication("v100")
    with pytest.raises(ValueError, match="are measured; use communication"):
        Modelled(device(HERE))
    with pytest.raises(LookupError, match=r"over gloo has not been measured .* labkit doctor --calibrate"):
        communication(HERE)


# ---- tables


def test_interpolation():
    known = table(all_reduce=((1024, 1e-4), (4096, 2e-4), (16384, 8e-4)))
    assert known.seconds("all_reduce", 0) == known.seconds("all_reduce", 1) == known.latency("all_reduce") == 1e-4
    assert known.seconds("all_reduce", 1024) == 1e-4 and known.seconds("all_reduce", 4096) == pytest.approx(2e-4)
    assert known.seconds("all_reduce", 2048) == pytest.approx(math.sqrt(2) * 1e-4)  # halfway on both scales
    assert known.seconds("all_reduce", 8192) == pytest.approx(4e-4)
    assert known.seconds("all_reduce", 10 * 16384) == pytest.approx(8e-3)  # the last bandwidth
    assert known.bus_bandwidth("all_reduce") == pytest.approx(16384 / 8e-4)
    with pytest.raises(LookupError, match="no time is known for all_to_all on 2 gloo ranks: gloo has none"):
        replace(known, missing={"all_to_all": "gloo has none"}).seconds("all_to_all", 1)


def test_a_median_above_that_of_a_larger_size_does_not_count():
    disturbed = table(send=((1024, 5e-4), (4096, 1e-4), (16384, 3e-4), (65536, 2e-4)))
    assert [disturbed.seconds("send", 4**power) for power in (5, 6, 7, 8)] == pytest.approx([1e-4, 1e-4, 2e-4, 2e-4])
    assert disturbed.points["send"][0].seconds == 5e-4  # what was measured stays in the table


def test_delays_are_what_calls_take_longer_after_computing():
    late = (1e-4, *[2e-4] * 9, *[5e-4] * 10)  # the fastest tenth ends at 2e-4
    known = table(all_reduce=((1024, 3e-4), (4096, 4e-4), (16384, 5e-4), (65536, 6e-4)))
    rows = known.points["all_reduce"]
    first = replace(rows[0], after_computing=late, computed=(0.0,) * 10 + (0.004,) * 10)
    known = replace(known, points={"all_reduce": (first, *rows[1:])})
    assert known.seconds("all_reduce", 1024) == known.latency("all_reduce") == 2e-4
    assert known.seconds("all_reduce", 4096) == pytest.approx(4e-4)  # of which no such calls are known
    model = Measured({2: known})
    for ranks in (2, 3):
        delays = model.time("all_reduce", 4000, ranks).delays
        assert delays == {0.0: pytest.approx([0.0] * 10), 0.004: pytest.approx([3e-4] * 10)}
        assert model.time("all_reduce", 1 << 20, ranks).delays == {}
    older = Measured({2: replace(known, points={"all_reduce": (replace(first, computed=()), *rows[1:])})})
    assert older.time("all_reduce", 4000, 2).delays == {0.0: pytest.approx([0.0] * 10 + [3e-4] * 10)}


def test_other_numbers_of_ranks_are_scaled_and_marked_as_modelled():
    rows = ((1024, 1e-4), (1 << 20, 1e-3))
    model = Measured({2: table(2, all_reduce=rows), 8: table(8, all_reduce=((1024, 9e-4),))})
    assert model.time("all_reduce", 1 << 20, 2).source == "measured"
    third = model.time("all_reduce", 1 << 20, 3)  # twice the messages in a row, 4/3 of the bytes per link
    assert third.source == "modelled" and third.algorithm == "ring"
    assert third.seconds == pytest.approx(2 * 1e-4 + 9e-4 * 4 / 3)
    assert model.seconds("all_reduce", 1024, 7) == pytest.approx(9e-4 * 12 / 14)  # of 8, which are nearer
    with pytest.raises(LookupError, match="links between nodes were not measured"):
        model.time("all_reduce", 1, 4, nodes=2)


def test_files_round_trip(cache):
    nothing = stored(MACHINE)
    assert nothing.tables == nothing.problems == () and "has not been measured" in tables_in_words(nothing)
    two, four = table(all_reduce=((1024, 1e-4), (4096, 2e-4))), table(4, send=((1024, 1e-4),))
    four = replace(four, missing={"all_to_all": "unsupported"}, kernels={"slowdown": 1.2})
    two = replace(two, kernels={"slowdown": 2.04})
    assert [store(links_of).name for links_of in (four, two)] == ["gloo-4.json", "gloo-2.json"]
    assert stored(MACHINE).tables == (two, four)
    assert measured(MACHINE, "gloo").time("all_reduce", 1024, 2).seconds == 1e-4
    busy = "while the machine was busy (its ranks computed 2.0 times as long as alone)"
    on = "gloo ranks, measured on 2026-11-22"
    assert tables_in_words(stored(MACHINE)) == f"2 {on} {busy}; 4 {on}"
    with pytest.raises(LookupError, match="communication over nccl has not been measured"):
        measured(MACHINE, "nccl")
    store(replace(two, points={}))  # measured again: the newest counts
    assert stored(MACHINE).tables[0].points == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:50], "it is not JSON"),
        (lambda text: "[]", "it must be an object"),
        (lambda text: "\x00\ud800", "it is not"),
        (lambda text: text.replace('"v": 2', '"v": 1'), "it was written by another version of labkit"),
        (lambda text: text.replace("0.0001", '"fast"'), "must be a number"),
        (lambda text: text.replace("0.0001", "NaN"), "must be a number"),
        (lambda text: text.replace("4096", "1024"), "operations.all_reduce must be in order of size"),
        (lambda text: text.replace('"torch": "2.13"', '"torch": "2.9"'), "with torch 2.9, and torch 2.13 is installed"),
        (lambda text: text.replace('"machine": "4', '"machine": "64'), "on another machine (64 × "),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(cache, change, says):
    path = store(table(all_reduce=((1024, 1e-4), (4096, 2e-4))))
    before = path.read_text(encoding="utf-8")
    path.write_text(change(before), encoding="utf-8", errors="surrogatepass")
    assert path.read_bytes() != before.encode()
    found = stored(MACHINE)
    assert found.tables == ()
    (problem,) = found.problems
    assert problem.startswith(f"{path} cannot be used: ") and says in problem and "\n" not in problem
    assert problem.endswith("measure again with labkit doctor --calibrate")
    with pytest.raises(LookupError, match="cannot be used"):
        measured(MACHINE, "gloo")


def test_a_link_in_place_of_a_file_is_not_followed(cache, tmp_path):
    path = store(table(all_reduce=((1024, 1e-4),)))
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert stored(MACHINE).tables == () and len(stored(MACHINE).problems) == 1


def test_hardware_in_words_names_cores_and_gpus():
    two = dataclasses.replace(MACHINE, gpus=(Gpu(0, "Tesla T4", 1, (7, 5)), Gpu(1, "Tesla T4", 1, (7, 5))))
    assert two.hardware.startswith("4 × ") and two.hardware.endswith("; 2 × Tesla T4")


# ---- communication against computation

WIDTH, INNER, EXPERT = 8192, 28672, 14336


@pytest.fixture
def without_latency(monkeypatch):
    """A machine of two nodes whose links have 300 GB/s and 50 GB/s and whose messages take no time to start."""
    row = DEVICES["h100x8"]
    inside, between = (
        dataclasses.replace(link, simple=Rate(0.0, rate), low_latency=Rate(0.0, rate / 2))
        for link, rate in ((row.inside, 300e9), (row.between, 50e9))
    )
    monkeypatch.setitem(links.DEVICES, "h100x8", dataclasses.replace(row, inside=inside, between=between))
    monkeypatch.setattr(links, "_CALL", dict.fromkeys(links._CALL, 0.0))
    accelerator = row.accelerator
    return accelerator.peak("bf16") * accelerator.efficiency


def test_without_latency_they_are_the_formulas_of_the_scaling_book(without_latency):
    reached, devices, local = without_latency, 32, 8
    alpha, between = reached / 300e9, reached / 50e9
    nodes = devices // local
    least = Balance("h100x8", devices, WIDTH, INNER, EXPERT).thresholds()
    fsdp = alpha * (devices - 1) / devices
    assert between / local < alpha, "eight adapters together are faster than one link within the node"
    assert least["FSDP"] == pytest.approx(fsdp, abs=2)
    tensor = (local - 1) * alpha / INNER
    assert tensor < 1 and least["TP 8"] == 1
    assert least["FSDP × TP 8"] == pytest.approx(between / local * (nodes - 1) / nodes / (1 - tensor), abs=2)
    assert least["EP 8"] == (1 if alpha * (local - 1) / local <= EXPERT else None)
    assert least["EP 32"] == (1 if between * (devices - local) / devices <= EXPERT else None)


def test_the_threshold_is_where_the_ratio_passes_one():
    balance = Balance("a100x8")
    for name, least in balance.thresholds().items():
        ratio = balance.ratios()[name]
        if least is None:
            assert ratio(links.MOST_TOKENS) > 1
        else:
            assert ratio(least) <= 1 and (least == 1 or ratio(least - 1) > 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"machine": "here"}, "machine must be one of t4x2"),
        ({"width": 0}, "width must be an integer from 1"),
        ({"devices": 20}, "devices must be two or more nodes of 8, got 20"),
        ({"machine": "t4x2", "devices": 4}, "bf16"),
    ],
)
def test_what_a_machine_lacks_is_refused(asked, words):
    with pytest.raises((ValueError, LookupError), match=words):
        Balance(**asked).thresholds()
