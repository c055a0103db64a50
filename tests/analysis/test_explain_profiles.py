"""Traces of torch's profiler: the reader, and where the time of the ranks went."""

from __future__ import annotations

import csv
import json
import random
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from chrome_traces import ALL_REDUCE, all_reduce, event, hostile, kernel, step, trace, write
from places import ROOT

from labkit.analysis.foreign import ForeignError, Page, opening, reading
from labkit.analysis.foreign.profiles import arrivals, collectives, explain
from labkit.analysis.foreign.trace import Stream, analyse, operation, read_profile

TRACES = ROOT.parent / "shared" / "traces"  # profiles of real accelerators, which are not part of the repository
# Computed by HolisticTraceAnalysis 0.5.0 with HTA_DISABLE_NS_ROUNDING=1: get_temporal_breakdown, get_comm_comp_overlap
with (Path(__file__).parent / "hta.csv").open(encoding="utf-8") as file:
    EXPECTED = {row["trace"]: row for row in csv.DictReader(file)}


def opened(path: Path, *events, **settings):
    return analyse(read_profile(write(path, trace(events, **settings))))


def page(path: Path) -> Page:
    return opening.explain([path])[0]


# ---- against an independent reference


@pytest.mark.parametrize("name", EXPECTED)
def test_traces_agree_with_holistic_trace_analysis(name, tmp_path):
    """Real ones, and generated ones (`hostile_07.json.gz`)."""
    path = TRACES / name
    if name.startswith("hostile_"):
        path = write(tmp_path / name, hostile(int(name[8:10])))
    elif not path.exists():
        pytest.skip(f"{TRACES} is not here")
    expected, total = EXPECTED[name], analyse(read_profile(path)).total
    assert total.span * 1e6 == pytest.approx(float(expected["kernel_us"]), rel=0.01)
    assert total.idle * 1e6 == pytest.approx(float(expected["idle_us"]), rel=0.01)
    assert total.computation * 1e6 == pytest.approx(float(expected["compute_us"]), rel=0.01)
    if expected["overlap_percent"]:
        overlap = 100 * total.overlapped / total.communication
        assert overlap == pytest.approx(float(expected["overlap_percent"]), rel=0.01, abs=0.006)  # two digits
    else:
        assert total.communication == 0


# ---- the breakdown of a step


def test_what_share_of_a_file_is_read_can_be_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 1 << 12)
    path = write(tmp_path / "a.json", hostile(1))
    shares: list[float] = []
    with reading.watched(lambda read, share: shares.append(share)):
        read_profile(path)
    assert len(shares) > 5 and shares == sorted(shares) and shares[0] < shares[-1] == 1
    before = len(shares)
    read_profile(path)
    assert len(shares) == before, "only within it"


def test_breakdown_of_a_step(tmp_path):
    """Two kernels overlap, the all-reduce overlaps with half of the second, a copy runs alone, the rest is idle."""
    found = opened(
        tmp_path / "rank0.json",
        step(1, 0, 1000),
        kernel(100, 100),
        kernel(150, 150),
        all_reduce(250, 150),
        kernel(450, 50, name="Memcpy HtoD (Pageable -> Device)"),
        kernel(600, 100),
        step(2, 1000, 1000),
        kernel(1100, 500),
    )
    us = {name: round(1e6 * value, 3) for name, value in vars(found.total).items()}
    assert us == {
        "span": 600,
        "computation": 300,
        "communication": 150,
        "exposed": 100,
        "copies": 50,
        "idle": 150,
        "launch_bound": 4,  # the 2 µs of each launch: the CPU runs no operator otherwise
        "starved": 146,
    }
    assert [number for number, _, _ in found.steps] == [1]
    assert found.by_step == {1: found.total}
    assert round(1e6 * found.total.overlapped) == 50


def test_kernels_are_launch_bound_while_the_cpu_runs_operators(tmp_path):
    launches = [kernel(100 * number, 10) for number in range(10)]
    profile = read_profile(write(tmp_path / "a.json", trace([event("cpu_op", "aten::add", 0, 900), *launches])))
    found = explain([profile]).findings
    assert [finding.name for finding in found] == ["launch_bound"]
    assert found[0].title == "the GPU waits 89% of the profiled time for the CPU to launch kernels on rank 0"


def test_kernels_that_wait_in_the_queue_are_not_launch_bound(tmp_path):
    found = opened(tmp_path / "a.json", *(kernel(100 * number, 90, launched=0) for number in range(10)))
    assert found.total.launch_bound == found.total.starved == 0
    assert round(1e6 * found.total.idle) == 90


def test_without_a_gpu_operators_count_as_computation(tmp_path):
    found = opened(
        tmp_path / "cpu.json",
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::addmm", 10, 80),
        event("cpu_op", "c10d::allreduce_", 100, 5),
        event("user_annotation", "gloo:all_reduce", 100, 50),
        event("cpu_op", "aten::add", 140, 60),
    )
    total = found.total
    assert [round(1e6 * value) for value in (total.computation, total.communication, total.exposed)] == [160, 50, 40]
    page = explain([found.profile])
    operators = {row["name"]: round(1e6 * row["seconds"]) for row in page.figures["kernels"]}
    assert operators == {"aten::linear": 20, "aten::addmm": 80, "aten::add": 60}
    assert "Nothing ran on a GPU: operators of the CPU count as computation." in page.notes


# ---- collectives


def test_bus_bandwidth_is_that_of_nccl_tests(tmp_path):
    found = opened(tmp_path / "a.json", all_reduce(0, 1000, elements=1_000_000, ranks=4))
    row = collectives([found])[0]
    assert (row.operation, row.ranks, row.bytes) == ("all_reduce", 4, 4_000_000)
    assert row.bus_bandwidth == pytest.approx(4e6 / 1e-3 * 2 * 3 / 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ALL_REDUCE, "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*)", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "other collective"),
    ],
)
def test_names_of_collectives(name, expected):
    assert operation(name) == expected


def test_without_sizes_no_bandwidth_is_given(tmp_path):
    found = page(write(tmp_path / "a.json", trace([all_reduce(0, 100)])))
    assert found.figures["collectives"][0]["bus_bandwidth"] is None
    assert any("Bus bandwidth needs" in note for note in found.notes)
    assert any("1 of 2 ranks are here" in note for note in found.notes)


def test_without_groups_collectives_are_matched_that_every_rank_has_called(tmp_path):
    """On gloo: ranks 0 and 1 also call one in their pair, which the trace does not tell from the others."""
    paths = []
    for rank in range(3):
        events = [event("cpu_op", "aten::mm", 0, 100)]
        for number in range(4):
            begin = 1000 * number + (300 if rank == 2 else 100)
            sizes = {"Input Dims": [[64]], "Input type": ["float"]}
            events.append(event("user_annotation", "gloo:all_reduce", begin, 1000 * number + 400 - begin, **sizes))
            if rank < 2:
                pair = sizes | {"Input Dims": [[8]]}
                events.append(event("user_annotation", "gloo:all_reduce", 1000 * number + 500, 50, **pair))
        content = trace(events, rank=rank, world_size=3, host_name="node-7", deviceProperties=[])
        paths.append(write(tmp_path / f"rank{rank}.json", content))
    late = arrivals([analyse(read_profile(path)) for path in paths])
    assert (late.matched, late.last[2]) == (4, 4)


def test_the_rank_that_arrives_last_is_found_although_its_clock_is_wrong(tmp_path):
    """Rank 1 computes 300 µs longer; its clock is 7 s ahead."""
    profiles = []
    for rank, (arrives, ahead) in enumerate([(100, 0), (400, 7_000_000)]):
        events = []
        for number in range(5):
            at = 1000 * number + ahead
            events += [step(number, at, 1000), kernel(at + 10, arrives - 10)]
            events += all_reduce(at + arrives, 500 - arrives, elements=1000)
        profiles.append(read_profile(write(tmp_path / f"rank{rank}.json.gz", trace(events, rank=rank))))
    late = arrivals([*map(analyse, profiles)])
    assert late.matched == 4
    assert late.ahead[1] == pytest.approx(7, abs=1e-5)
    assert late.last == {0: 0, 1: 4}
    assert late.waited[0] == pytest.approx(4 * 300e-6, abs=1e-6)
    found = explain(profiles)
    assert found.findings[0].title == "rank 1 arrives last in 4 of 4 collectives; the others wait for it"
    assert "0.3 ms per step" in found.findings[0].evidence
    assert json.loads(json.dumps(found.figures))["arrivals"]["last"] == {"0": 0, "1": 4}


def test_collectives_that_differ_are_not_matched(tmp_path):
    profiles = [
        read_profile(write(tmp_path / f"{rank}.json", trace([all_reduce(0, 9, elements=rank + 1)], rank=rank)))
        for rank in range(2)
    ]
    assert "The collectives of the files cannot be matched, so it is not known which rank arrives last." in (
        explain(profiles).notes
    )


def test_sampled_events_are_reported(tmp_path):
    events = [event("cpu_op", "aten::add", 10 * number, 5, **{"Ev Idx": 100 * number}) for number in range(100)]
    found = page(write(tmp_path / "a.json", trace(events)))
    assert any("events were left out of the file" in note for note in found.notes)
    assert not found.findings


# ---- the reader


@pytest.mark.thorough
def test_events_are_the_same_in_chunks_of_any_size(tmp_path, monkeypatch):
    """Strings contain brackets, quotes and backslashes, and arguments are nested."""
    nasty = ['}{][,"', 'a "quoted" \\', "\\\\", '{"ph": "X"}, {', "]}", "é\u2028"]
    events = [
        event("cpu_op", f"{nasty[number % 6]} {number}", number, 1, deep=[{"a": nasty}, [[]]]) for number in range(40)
    ]
    content = trace(events, baseTimeNanoseconds=5) | {"traceName": "}], {"}
    for indent in (None, 2):
        path = write(tmp_path / "a.json", json.dumps(content, indent=indent, ensure_ascii=False))
        for chunk in (1, 7, 100, 1 << 20):
            monkeypatch.setattr(reading, "_CHUNK", chunk)
            with path.open("rb") as file:
                stream = Stream(reading.Content(file, path), path)
                read = [(event.name, event.ts, json.loads(bytes(event.args))) for some in stream for event in some]
            assert read == [(event["name"], event["ts"], event["args"]) for event in events]
            assert stream.metadata["traceName"] == "}], {"
            assert stream.metadata["distributedInfo"]["world_size"] == 2
            assert (stream.unreadable, stream.cut) == (0, "")


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 1 << 17)

    def peak(count: int) -> int:
        text = json.dumps([event("python_function", "f" * 50, number, 1, x="y" * 100) for number in range(count)])
        path = write(tmp_path / "a.json", '{"traceEvents": ' + text + "}")
        with path.open("rb") as file:
            tracemalloc.start()
            for _ in Stream(reading.Content(file, path), path):
                pass
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return found

    assert peak(20_000) < 1.5 * peak(4_000)


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path):
    text = json.dumps(trace([kernel(100 * number, 10) for number in range(50)]))
    whole, half = write(tmp_path / "a.json", text), write(tmp_path / "b.json", text[: len(text) // 2])
    assert 20 < len(read_profile(half).gpu) < len(read_profile(whole).gpu) == 50
    assert "ends early: its last event is not complete" in read_profile(half).notes[0]
    packed = write(tmp_path / "c.json.gz", text)
    packed.write_bytes(packed.read_bytes()[:-200])
    assert "its compressed data is damaged" in read_profile(packed).notes[0]


def test_an_event_that_is_no_json_is_left_out(tmp_path):
    text = json.dumps(trace([kernel(0, 10), kernel(20, 10), event("kernel", "x", 40, 10, bandwidth=0)]))
    found = read_profile(write(tmp_path / "a.json", text.replace('"bandwidth": 0', '"bandwidth": inf')))
    assert len(found.gpu) == 2
    assert found.notes == ["a.json: 1 event cannot be read and are left out."]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("hello", "is nothing that can be explained"),
        (b"", "is empty, so nothing can be explained"),
        ('{"a": 1}', "is nothing that can be explained"),
        ('{"schemaVersion": 1}', "has no list traceEvents"),
        ('{"traceEvents": {}}', "has no list traceEvents"),
        ('{"traceEvents": []}', "has no events of operators or kernels"),
        ('{"traceEvents": [1, [], "x", null]}', "has no events of operators or kernels"),
        ('{"traceEvents": [' + "[" * 100_000, "has no events of operators or kernels"),
        ('{"traceEvents": [{"name": "' + "x" * (17 << 20), "has an event of more than 16.0 MiB"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, content, says):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(ForeignError, match=says) as caught:
        opening.explain([path])
    assert str(path) in str(caught.value)


def test_a_compressed_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_LARGEST_FILE", 1 << 20)
    path = write(tmp_path / "a.json.gz", '{"traceEvents": [' + " " * (2 << 20))
    with pytest.raises(ForeignError, match="profile fewer steps"):
        opening.explain([path])


def test_values_of_wrong_types_are_left_out(tmp_path):
    wrong = [None, True, "1", [], {}, 1e400, -1, "NaN", 10**30]
    events = [event("kernel", "k", 1, 1) | {field: value} for field in ("ts", "dur", "name", "cat") for value in wrong]
    events += [event("kernel", ALL_REDUCE, 1, 1) | {"args": value} for value in wrong]
    keys = ("correlation", "In msg nelems", "dtype", "Group size", "Process Group Name", "Input Dims", "Ev Idx")
    events += [event("kernel", ALL_REDUCE, 5, 1, **{key: value}) for key in keys for value in wrong]
    text = json.dumps(trace([*events, kernel(10, 5)], baseTimeNanoseconds="x", host_name=7))
    for value in ("7", "null", '{"rank": -1, "pg_config": [1, {"pg_name": 2}], "world_size": []}'):
        content = text.replace("Infinity", "1e400")
        content = content.replace('"distributedInfo": {', f'"distributedInfo": {value}, "x": {{')
        found = page(write(tmp_path / "a.json", content))
        assert found.figures["ranks"][0]["rank"] is None
        json.dumps(found.figures, allow_nan=False)


def test_mutated_traces_never_crash(tmp_path):
    """Each is explained, or refused in one sentence that names the file."""
    generator = random.Random(7)
    events = [step(1, 0, 500), all_reduce(10, 50, elements=10), kernel(80, 20), event("cpu_op", "aten::add", 0, 400)]
    text = json.dumps(trace([*events, step(2, 500, 500)])).encode()
    tokens = [b"null", b"-1", b"[[[[", b"}", b'"', b"\\", b"1e999", b"true", b"\xff", b"\x00", b"99999999999999999999"]
    refused = 0
    for number in range(100):
        data = bytearray(text)
        for _ in range(generator.randrange(1, 8)):
            at = generator.randrange(len(data))
            data[at : at + generator.randrange(6)] = generator.choice(tokens)
        path = write(tmp_path / f"{number}.json", bytes(data))
        try:
            json.dumps(page(path).figures, allow_nan=False)
        except ForeignError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused < 90


def test_a_folder_stands_for_the_files_that_can_be_explained(tmp_path):
    write(tmp_path / "notes.txt", "hello")
    for rank in range(2):
        write(tmp_path / f"{rank}.json", trace([kernel(0, 10)], rank=rank))
    assert page(tmp_path).title.startswith("2 profiles of torch.profiler · ranks 0, 1 of 2 · NVIDIA H100 · nccl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForeignError, match="has no file that can be explained"):
        page(tmp_path / "empty")


# ---- files that do not say all


def test_the_rank_of_a_trace_that_has_none(tmp_path):
    """torch writes it only if the process group existed; then the name of the file may have it, or it is a text."""
    for name, info in {"trace_rank_3.json": {}, "host_4711.json": {"rank": "3", "world_size": "4"}}.items():
        path = write(tmp_path / name, trace([kernel(0, 10)]) | {"distributedInfo": info})
        assert read_profile(path).rank == 3
    assert read_profile(write(tmp_path / "host_1.json", trace([kernel(0, 1)]) | {"distributedInfo": {}})).rank is None


def test_an_archive_and_a_file_of_which_nothing_is_left(tmp_path):
    with zipfile.ZipFile(tmp_path / "traces.zip", "w") as file:
        file.writestr("rank0.json", json.dumps(trace([kernel(0, 10)])))
    with tarfile.open(tmp_path / "traces.tar.gz", "w:gz") as file:
        file.add(tmp_path / "traces.zip")
    for name in ("traces.zip", "traces.tar.gz"):
        with pytest.raises(ForeignError, match="is an archive; unpack it"):
            opening.explain([tmp_path / name])
    whole = write(tmp_path / "a.json.gz", trace([kernel(0, 10)])).read_bytes()
    (tmp_path / "a.json.gz").write_bytes(whole[:20])
    with pytest.raises(
        ForeignError, match=r"a\.json\.gz cannot be read: its compressed data is damaged .*; copy it again"
    ):
        opening.explain([tmp_path / "a.json.gz"])
