"""Snapshots of CUDA memory: nothing in them is executed, totals are those of torch's own viewer, and findings are made
only where the memory shows them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from snapshots import (
    MIB,
    SITE,
    USER,
    Allocator,
    OutOfMemory,
    backward,
    frame,
    module,
    native,
    optimizer,
    parameters,
    script,
    train,
    write,
)
from torch.cuda import _memory_viz

import labkit
from labkit.analysis.foreign import ForeignError, Page, memory_events, opening
from labkit.analysis.foreign.reading import plain_pickle

RECORDED = (
    Path(labkit.__file__).parent / "course/build/starters/leak.pickle.gz"
)  # torch's own allocator, on the stand-in
RECORDED_PEAK = 51_130_572  # torch.cuda.memory_stats()["requested_bytes.all.peak"] at its end


def page(*paths: Path) -> Page:
    (found,) = opening.explain(paths)
    return found


def explained(folder: Path, gpu: Allocator | dict[str, Any], name: str = "snapshot.pickle") -> Page:
    return page(write(folder / name, gpu.snapshot() if isinstance(gpu, Allocator) else gpu))


def device(found: Page) -> dict[str, Any]:
    (figures,) = found.figures["devices"]
    return figures


def names(found: Page) -> list[str]:
    return [finding.name for finding in found.findings]


def trained(**options: Any) -> Allocator:
    gpu = Allocator()
    train(gpu, **options)
    return gpu


def randomly(seed: int) -> Allocator:
    """Random requests and frees, also until memory runs out."""
    generator = random.Random(seed)
    gpu = Allocator(capacity=600 * MIB, most_events=generator.choice([50, 1 << 30]))
    live: list[int] = []
    for _ in range(generator.randrange(40, 400)):
        if live and generator.random() < 0.45:
            gpu.free(live.pop(generator.randrange(len(live))), waits=generator.random() < 0.02)
            continue
        try:
            length = generator.choice([3, 700, 512, 40_000, MIB, MIB + 1, 5 * MIB, 37 * MIB, 64 * MIB])
            live.append(gpu.alloc(length, script(generator.randrange(20, 30))))
        except OutOfMemory:
            continue
    return gpu


# ---- the same totals as torch's own viewer


def of_viewer(snapshot: dict[str, Any]) -> dict[str, str]:
    """What torch's viewer says about the segments."""
    return dict(re.findall(r"^total_(\w+): (\S+)", _memory_viz.segsum(snapshot), re.MULTILINE))


@pytest.mark.parametrize("seed", range(20))
def test_totals_are_those_of_torchs_viewer(seed, tmp_path):
    gpu = randomly(seed)
    snapshot = gpu.snapshot()
    pools = device(explained(tmp_path, gpu))["pools"]
    allocated = sum(_memory_viz.calc_active(segment) for segment in snapshot["segments"])
    assert sum(pool["allocated"] for pool in pools) == allocated
    assert {
        "reserved": _memory_viz._format_size(sum(pool["reserved"] for pool in pools)),
        "allocated": _memory_viz._format_size(sum(pool["requested"] for pool in pools)),
    }.items() <= of_viewer(snapshot).items()


def test_a_snapshot_of_torchs_allocator_has_the_totals_and_the_peak_of_torch():
    found = device(page(RECORDED))
    snapshot = plain_pickle(gzip.decompress(RECORDED.read_bytes()))
    assert found["peak"] == RECORDED_PEAK
    assert found["history"]["unmatched"] == found["history"]["before"] == 0
    allocated = sum(_memory_viz.calc_active(segment) for segment in snapshot["segments"])
    assert sum(pool["allocated"] for pool in found["pools"]) == allocated
    assert (
        _memory_viz._format_size(sum(pool["requested"] for pool in found["pools"])) == of_viewer(snapshot)["allocated"]
    )
    assert sum(held["bytes"] for held in found["at_peak"]) == found["peak"]
    assert {
        ("train.py:15", "forward"),
        ("train.py:15", "cuBLAS workspace"),
        ("train.py:19", "model"),
        ("train.py:28", "optimizer"),
        ("autograd engine: AddmmBackward0", "backward"),
    } <= {(held["line"], held["phase"]) for held in found["at_peak"]}


@pytest.mark.parametrize("seed", range(20))
def test_the_replayed_peak_is_that_of_the_allocator(seed, tmp_path):
    gpu = randomly(seed)
    found = device(explained(tmp_path, gpu))
    assert found["history"]["unmatched"] == 0
    assert found["end"] == gpu.active
    if gpu.most_events >= len(gpu.events):
        assert (found["peak"], found["reserved"]) == (gpu.peak, gpu.reserved_peak)
    else:
        assert gpu.active <= found["peak"] <= gpu.peak


# ---- what holds the peak


def test_the_peak_by_line_and_phase(tmp_path):
    found = explained(tmp_path, trained())
    assert found.title == "1 memory snapshot · device 0 · peak 171.0 MiB · reserved 202.0 MiB"
    assert found.findings == []
    figures = device(found)
    assert {(held["line"], held["phase"]): held["bytes"] for held in figures["at_peak"]} == {
        ("train.py:24", "optimizer"): 64 * MIB,
        ("model.py:31", "forward"): 64 * MIB,
        ("train.py:10", "model"): 32 * MIB,
        ("autograd engine: AddmmBackward0", "backward"): 8 * MIB,
        ("train.py:20", ""): 3 * MIB,
        ("train.py:22", ""): 4,
    }
    (table,) = (table for table in found.tables if table.title == "Memory at the peak, by line")
    assert table.rows[0] == ("model.py:31", "forward", "64.0 MiB", "37%", "4")
    assert found.notes == []


@pytest.mark.parametrize(
    ("frames", "line", "phase"),
    [
        (script(20), "train.py:20", ""),
        (module(21, layer=31), "model.py:31", "forward"),
        (parameters(), "train.py:10", "model"),
        (optimizer(24), "train.py:24", "optimizer"),
        (backward("ReluBackward0"), "autograd engine: ReluBackward0", "backward"),
        (native("torch::autograd::Engine::thread_main()"), "autograd engine", "backward"),
        (native("c10d::ProcessGroupNCCL::allreduce()"), "no Python stack", "communication"),
        ([frame(f"{SITE}/distributed/c10d.py", 5), *script(21)], "train.py:21", "communication"),
        ([*native("at::cuda::getNewWorkspace()"), *module(21)], "model.py:31", "cuBLAS workspace"),
        ([frame("/lib/python3.11/site-packages/a/llama.py", 7), *module(21)], "model.py:31 (llama.py:7)", "forward"),
        ([frame(f"{SITE}/utils/checkpoint.py", 1), *backward()], "checkpoint.py:1", "recomputation"),
        ([frame("<ipython-input-4-ab>", 3)], "<ipython-input-4-ab>:3", ""),
        ([frame("/tmp/torchinductor_me/ab/cab.py", 3), *script(21)], "train.py:21", ""),
        ([frame("/usr/lib/python3.11/threading.py", 3)], "threading.py:3", ""),
        ([], "no Python stack", ""),
    ],
)  # fmt: skip
def test_the_line_and_phase_of_a_stack(frames, line, phase):
    stack = memory_events._Stacks()(frames)
    assert (stack.line, stack.phase) == (line, phase)


def test_without_a_history_the_end_is_shown(tmp_path):
    gpu = Allocator(most_events=0)
    train(gpu)
    found = explained(tmp_path, gpu)
    assert device(found)["peak"] is None and device(found)["history"] is None
    assert device(found)["end"] == gpu.active == 99 * MIB
    assert found.title == "1 memory snapshot · device 0 · in use 99.0 MiB · reserved 202.0 MiB"
    assert "not recorded" in found.notes[0]
    assert "Memory at the end, by line" in [table.title for table in found.tables]


def test_a_history_whose_beginning_is_overwritten(tmp_path):
    gpu = Allocator(most_events=120)
    train(gpu)
    found = explained(tmp_path, gpu)
    assert device(found)["history"]["overwritten"]
    assert device(found)["peak"] == gpu.peak  # it recurs in every step
    assert ("train.py:10", 32 * MIB) in [(held["line"], held["bytes"]) for held in device(found)["at_peak"]]
    assert "has lost its beginning" in found.notes[0]


def test_a_history_that_begins_after_the_model_was_built(tmp_path):
    gpu = trained()
    snapshot = gpu.snapshot()
    built = 1 + max(at for at, event in enumerate(gpu.events) if event["frames"] == parameters())
    snapshot["device_traces"] = [gpu.events[built:]]
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [] if block["frames"] == parameters() else block["frames"]
    found = explained(tmp_path, snapshot)
    assert device(found)["history"] == {
        "events": len(gpu.events) - built, "overwritten": False, "before": 32 * MIB, "unmatched": 0, "stacks": True
    }  # fmt: skip
    assert found.notes == [
        "Up to 32.0 MiB was allocated before the history begins, so its lines are not known: call"
        " _record_memory_history() before the model is built."
    ]


def test_a_history_without_some_events_is_doubted(tmp_path):
    snapshot = trained().snapshot()
    snapshot["device_traces"] = [[event for event in snapshot["device_traces"][0] if event["action"] != "alloc"]]
    assert any("lacks events" in note for note in explained(tmp_path, snapshot).notes)


# ---- what grows


def test_losses_that_keep_their_graph(tmp_path):
    found = explained(tmp_path, trained(keeps_graph=True))
    (finding,) = found.findings
    assert finding.title == "memory of device 0 grows by 64.0 MiB per iteration (model.py:31)"
    assert finding.evidence == (
        "in 9 iterations of the loop at train.py:20-24, memory in use grew from 166.0 MiB to 742.0 MiB; never freed,"
        " per iteration: model.py:31 64.0 MiB, train.py:22 4 B"
    )
    assert "losses.append(loss.item())" in finding.fix
    growth = device(found)["growth"]
    assert growth["per_iteration"] == 64 * MIB + 4 and growth["iterations"] == 9


def test_the_leak_in_a_snapshot_of_torchs_allocator():
    (finding,) = page(RECORDED).findings
    assert finding.title == "memory of device 0 grows by 2.8 MiB per iteration (train.py:15)"


def test_a_list_of_outputs(tmp_path):
    found = explained(tmp_path, trained(steps=20, extra=lambda gpu, step: gpu.alloc(2 * MIB, script(25))))
    (finding,) = found.findings
    assert finding.title == "memory of device 0 grows by 2.0 MiB per iteration (train.py:25)"
    assert "a cache that is never emptied" in finding.cause


def test_iterations_are_those_of_the_optimizer_if_stacks_show_none(tmp_path):
    snapshot = trained(keeps_graph=True).snapshot()
    for event in snapshot["device_traces"][0]:
        event["frames"] = []
    found = explained(tmp_path, snapshot)
    (finding,) = found.findings
    assert finding.title == "memory of device 0 grows by 64.0 MiB per iteration (no Python stack)"
    assert "of optimizer steps" in finding.evidence
    assert any("No stacks are recorded" in note for note in found.notes)


class Window:
    """Keeps the newest three outputs."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def __call__(self, gpu: Allocator, step: int) -> None:
        self.kept.append(gpu.alloc(2 * MIB, script(25)))
        if len(self.kept) > 3:
            gpu.free(self.kept.pop(0))


def fills(gpu: Allocator, step: int) -> None:
    """A cache with six entries."""
    if step < 6:
        gpu.alloc(4 * MIB, script(25))


def scalars(gpu: Allocator, step: int) -> None:
    """A list of detached losses."""
    gpu.alloc(4, script(25))


@pytest.mark.parametrize(
    "healthy",
    [
        lambda: trained(steps=20),
        lambda: trained(steps=20, extra=fills),
        lambda: trained(steps=20, extra=Window()),
        lambda: trained(steps=20, extra=scalars),
        lambda: trained(steps=1, layers=60, keeps_graph=True),
    ],
    ids=["parameters and optimizer state", "a full cache", "the newest outputs", "detached losses", "many layers"],
)
def test_what_does_not_grow_is_not_reported(healthy, tmp_path):
    assert explained(tmp_path, healthy()).findings == []


def test_the_layers_of_a_forward_pass_are_no_iterations(tmp_path):
    """The snapshot is taken in the middle of a step; a loop over layers has allocated at two lines in turns."""
    gpu = trained(steps=3)
    for _ in range(40):
        gpu.alloc(4 * MIB, module(21, layer=40))
        gpu.alloc(4 * MIB, module(21, layer=41))
    assert explained(tmp_path, gpu).findings == []


# ---- memory runs out


def holes(requested: int, piece: int = 64 * MIB, capacity: int = 2 << 30) -> Allocator:
    """Every second piece of a large segment is free, and then a larger piece is requested."""
    gpu = Allocator(capacity)
    gpu.free(gpu.alloc(capacity * 3 // 4, script(12)))
    pieces = [gpu.alloc(piece, script(13)) for _ in range(capacity * 3 // 4 // piece)]
    for address in pieces[::2]:
        gpu.free(address)
    with pytest.raises(OutOfMemory):
        gpu.alloc(requested, script(14))
    return gpu


def test_fragmentation_that_exhausts_memory(tmp_path):
    found = explained(tmp_path, holes(600 * MIB))
    (finding,) = found.findings
    assert finding.name == "out_of_memory_fragmented" and finding.kind == "wrong"
    assert finding.title == (
        "device 0 ran out of memory because of fragmentation (train.py:14): 600.0 MiB requested, 1.2 GiB free, but not"
        " in one piece"
    )
    assert finding.evidence == (
        "1.5 GiB reserved: 768.0 MiB in use and 768.0 MiB free in pieces of at most 64.0 MiB; 512.0 MiB free on the"
        " device; in use: train.py:13 768.0 MiB"
    )
    assert "expandable_segments:True" in finding.fix
    (oom,) = device(found)["ooms"]
    assert oom["free"] == {"bytes": 768 * MIB, "largest": 64 * MIB, "blocked": 768 * MIB}
    pool = device(found)["pools"][0]
    assert pool["free"] == oom["free"]


@pytest.mark.parametrize(
    ("line", "frames", "cause"),
    [
        ("model.py:31", module(21), "activations of the forward pass hold 100%"),
        ("train.py:10", parameters(), "parameters, gradients and optimizer state hold 100%"),
        ("train.py:20", script(20), "most of it: train.py:20"),
    ],
)
def test_memory_that_is_full(line, frames, cause, tmp_path):
    gpu = Allocator(capacity=1 << 30)
    with pytest.raises(OutOfMemory):
        while True:
            gpu.alloc(100 * MIB, frames)
    (finding,) = explained(tmp_path, gpu).findings
    assert finding.title == f"device 0 ran out of memory ({line}): 100.0 MiB requested, 24.0 MiB free on the device"
    assert finding.evidence == f"1000.0 MiB in use of 1000.0 MiB reserved: {line} 1000.0 MiB"
    assert cause in finding.cause


def test_memory_that_a_leak_has_filled(tmp_path):
    gpu = Allocator(capacity=1 << 30)
    with pytest.raises(OutOfMemory):
        train(gpu, steps=100, keeps_graph=True)
    found = explained(tmp_path, gpu)
    assert names(found) == ["out_of_memory", "memory_growth"]
    assert "every iteration keeps memory" in found.findings[0].cause


def test_more_is_reserved_than_ever_used(tmp_path):
    """Blocks that grow a little each time do not fit into the segments of those before."""
    gpu = Allocator(capacity=8 << 30)
    address = None
    for growing in range(8):
        if address is not None:
            gpu.free(address)
        address = gpu.alloc((200 + 10 * growing) * MIB, script(20))
    (finding,) = explained(tmp_path, gpu).findings
    assert finding.name == "memory_fragmented"
    assert finding.title == "device 0 reserves 1.6 GiB more than it ever uses"


def test_expandable_segments_are_not_called_fragmented(tmp_path):
    snapshot = holes(600 * MIB).snapshot()
    for segment in snapshot["segments"]:
        segment["is_expandable"] = True
    for event in snapshot["device_traces"][0]:
        event["action"] = (
            event["action"].replace("segment_alloc", "segment_map").replace("segment_free", "segment_unmap")
        )
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = explained(tmp_path, snapshot)
    assert names(found) == ["out_of_memory"]
    assert found.title.endswith(" · expandable_segments:True")
    assert any("fragmentation is not examined" in note for note in found.notes)


# ---- several files


def of_ranks(folder: Path, sizes: dict[int, int], name: str = "rank{}_memory.pickle") -> Page:
    for rank, length in sizes.items():
        gpu = trained()
        gpu.alloc(length, script(26))
        write(folder / name.format(rank), gpu.snapshot())
    return page(folder)


@pytest.mark.parametrize("name", ["rank{}_memory.pickle", "snapshot_rank_{}.json", "snapshot_{}.pickle"])
def test_ranks_are_compared(name, tmp_path):
    found = of_ranks(tmp_path, {0: 3 << 30, 1: MIB, 2: MIB}, name)
    assert found.title.startswith("3 memory snapshots · ranks 0, 1, 2 · device 0 · peak 171.0 MiB to 3.1 GiB")
    (finding,) = found.findings
    assert finding.title == "rank 0 uses 3.1 GiB at its peak, rank 1 only 171.0 MiB"
    assert finding.evidence == "the largest difference is at train.py:26: 3.0 GiB on rank 0, 0 B on rank 1"
    assert finding.ranks == (0, 1)
    assert [row[:2] for row in found.tables[0].rows] == [
        ("rank 0", "3.1 GiB"), ("rank 1", "171.0 MiB"), ("rank 2", "171.0 MiB")
    ]  # fmt: skip
    assert found.tables[0].rows[0][-1] == "train.py:26"


def test_what_happens_on_several_ranks_is_one_finding(tmp_path):
    for rank in range(3):
        write(tmp_path / f"rank{rank}.pickle", trained(keeps_graph=True).snapshot())
    (finding,) = page(tmp_path).findings
    assert finding.title == "memory of rank 0 grows by 64.0 MiB per iteration (model.py:31)"
    assert finding.evidence.endswith("; the same happens on rank 1, rank 2") and finding.ranks == (0, 1, 2)


def test_ranks_that_need_the_same(tmp_path):
    assert of_ranks(tmp_path, {0: 20 * MIB, 1: MIB}).findings == []


def test_files_without_a_rank_are_called_by_their_names(tmp_path):
    found = of_ranks(tmp_path, {128: MIB, 256: 3 << 30}, "context{}.pickle")
    assert found.findings == []  # they need not be ranks of one job
    assert [row[0] for row in found.tables[0].rows] == ["context128.pickle", "context256.pickle"]
    assert found.tables[0].heads[0] == "file"


def test_several_devices_of_one_process(tmp_path):
    snapshot, other = trained().snapshot(), Allocator(device=1)
    train(other, layers=2)
    second = other.snapshot()
    snapshot["segments"] += second["segments"]
    snapshot["device_traces"] += second["device_traces"][1:]
    found = explained(tmp_path, snapshot)
    assert [row[0] for row in found.tables[0].rows] == ["device 0", "device 1"]


# ---- the forms of a file


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_and_compression(protocol, tmp_path):
    snapshot = trained().snapshot()
    path = tmp_path / "anything.gz"
    path.write_bytes(gzip.compress(pickle.dumps(snapshot, protocol=protocol)))
    assert page(path).figures["devices"][0]["peak"] == trained().peak


def test_json_says_the_same(tmp_path):
    gpu = trained(keeps_graph=True)
    ours, theirs = (explained(tmp_path, gpu, name) for name in ("a.pickle", "a.json"))
    assert ours.findings == theirs.findings and ours.tables == theirs.tables


def test_a_list_of_segments_is_a_snapshot_without_history(tmp_path):
    """As torch.cuda.memory_snapshot() returns it."""
    gpu = trained()
    found = explained(tmp_path, gpu.snapshot()["segments"])
    assert device(found)["end"] == gpu.active and device(found)["history"] is None


def test_blocks_of_older_versions_have_no_addresses(tmp_path):
    snapshot = trained().snapshot()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            del block["address"]
    assert device(explained(tmp_path, snapshot))["history"]["unmatched"] == 0


def test_a_process_without_memory(tmp_path):
    found = explained(tmp_path, {"segments": [], "device_traces": [[]], "allocator_settings": {}})
    assert found.title == "1 memory snapshot without memory or events"


def test_it_is_told_apart_from_other_files_by_its_content(tmp_path):
    from flight_dumps import WORLD, call, dump

    (tmp_path / "a_0").write_bytes(pickle.dumps(dump([call(1)], {WORLD: [0]}), protocol=2))
    write(tmp_path / "b_0", trained().snapshot())
    write(tmp_path / "c.json", trained().snapshot())
    kinds = {found.figures["kind"] for found in opening.explain([tmp_path / name for name in ("a_0", "b_0", "c.json")])}
    assert kinds == {"flight_recorder", "memory_snapshot"}


# ---- hostile files


class Runs:
    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_executed(protocol, tmp_path):
    trap = tmp_path / "trap"
    content = trained(steps=1).snapshot()
    content["device_traces"].append(Runs(os.mkdir, str(trap)))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ForeignError, match="it would import or call something"):
        page(path)
    assert not trap.exists()


@pytest.mark.parametrize("suffix", [".pickle", ".json"])
def test_mutated_snapshots_never_crash(suffix, tmp_path):
    generator = random.Random(7)
    plain = write(tmp_path / f"whole{suffix}", holes(600 * MIB).snapshot()).read_bytes()
    tokens = [
        b"null",
        b"N",
        b"\x88",
        b"K\x05",
        b"(",
        b"]",
        b"}",
        b"u.",
        b'"',
        b"-1",
        b"\xff",
        b"[]",
        b"9" * 20,
        b"1e999",
    ]
    path = tmp_path / f"mutated{suffix}"
    for _ in range(100):
        data = bytearray(plain)
        for _ in range(generator.randrange(1, 6)):
            at = generator.randrange(2, len(data))
            data[at : at + generator.randrange(6)] = generator.choice(tokens)
        path.write_bytes(bytes(data))
        try:
            json.dumps([found.figures for found in opening.explain([path])])
        except ForeignError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def every_field(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each dict or list of a snapshot with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in [*value] if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from every_field(value[key])


@pytest.mark.thorough
def test_values_of_wrong_types_never_crash(tmp_path):
    deep: list[Any] = []
    deep.append(deep)
    wrong = [None, 7, -1, 1 << 62, -(1 << 70), "x", [], [None], {}, {"a": 1}, True, 1.5, float("nan"), deep, ((), 1)]
    generator = random.Random(3)
    path = tmp_path / "wrong.pickle"
    for _ in range(150):
        content = plain_pickle(pickle.dumps(randomly(5).snapshot()))
        fields = [*every_field(content)]
        for holder, key in generator.sample(fields, 8):
            holder[key] = generator.choice(wrong)
        content = generator.choice([content, content["segments"]])
        path.write_bytes(pickle.dumps(content))
        try:
            for found in opening.explain([path]):
                json.dumps(found.figures)
                assert all(len(row) == len(table.heads) for table in found.tables for row in table.rows)
        except ForeignError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_stacks_of_any_type_are_read_as_unknown():
    stacks = memory_events._Stacks()
    for frames in (None, 7, "x", {}, [None], [7, "x"], [{"filename": 7, "line": "x", "name": []}], [{}], [[]]):
        assert stacks(frames).line == "no Python stack"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pickle", pickle.dumps({"segments": 7}), "has no list segments"),
        ("a.json", b'{"segments": 7}', "has no list segments"),
        ("a.json", b'{"segments": [' + b"[" * 100_000, "is not JSON"),
        ("a.pickle", pickle.dumps({"segments": []})[:-1], "not complete"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ForeignError, match=says):
        page(tmp_path / name)


def test_a_file_that_is_too_large_is_refused_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_events, "_LARGEST", 1000)
    with pytest.raises(ForeignError, match=r"more than 1000 B; record fewer events: .*max_entries"):
        explained(tmp_path, trained())


def test_lines_of_a_user_with_torch_in_the_path_are_theirs():
    (stack,) = [memory_events._Stacks()([frame("/home/user/torch/train.py", 5), frame(USER, 9)])]
    assert stack.line == "train.py:5"
