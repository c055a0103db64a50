"""Dumps of torch's flight recorder: nothing in them is executed, and the verdict is that of torch's own analyser."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
from flight_dumps import WORLD, call, dump, write

from labkit.analysis.foreign import ForeignError, Page, opening
from labkit.analysis.foreign.reading import NoPlainPickle, plain_pickle

TENSOR, PIPELINE = ("1", "tp"), ("3", "pp")


def page(*paths: Path) -> Page:
    return opening.explain(paths)[0]


def job(ranks: int, calls: int = 6) -> dict[int, list[dict[str, Any]]]:
    """The calls of each rank, which are all completed."""
    return {rank: [call(number) for number in range(1, calls + 1)] for rank in range(ranks)}


def written(folder: Path, entries: dict[int, list[dict[str, Any]]], without: tuple[int, ...] = ()) -> Path:
    groups = {WORLD: range(len(entries))}
    return write(folder, {rank: dump(calls, groups) for rank, calls in entries.items() if rank not in without})


# ---- the same verdict as torch's own analyser


def missing() -> dict:
    entries = job(4)
    entries[1] = entries[1][:3]
    for rank in (0, 2, 3):
        entries[rank][3:] = [call(4, state="started")]
    return entries


def changed(rank: int, **changes: Any) -> dict:
    entries = job(4)
    for calls in entries.values():
        calls[4:] = [call(5, state="started")]
    entries[rank][4] = call(5, **{"state": "started"} | changes)
    return entries


def of(rank: int, op: str, **changes: Any) -> dict:
    """All call `op` as the fifth, one of them with changes."""
    entries = job(4)
    for calls in entries.values():
        calls[4:] = [call(5, op, "started")]
    entries[rank][4] |= changes
    return entries


def gathers(outputs: list[list[int]]) -> dict:
    entries = job(4)
    for calls in entries.values():
        calls.append(call(7, "all_gather", "started", outputs=outputs))
    return entries


def wrapped() -> dict:
    entries = missing()
    entries[0] = entries[0][1:]
    entries[2] = entries[2][2:]
    return entries


def exchanges(rank: int) -> dict:
    entries = job(4)
    for number, calls in entries.items():
        calls.append(call(7, "all_to_all", "started", outputs=[[8 + (number == rank)]]))
    return entries


SCENARIOS = {
    "completed": (job(4), None),
    "missing": (missing(), ("missing", 4, {1})),
    "wrapped": (wrapped(), ("missing", 4, {1})),
    "operation": (changed(2, op="all_gather", outputs=[[32]]), ("operation", 5, {2})),
    "size": (changed(3, sizes=[[7]]), ("size", 5, {3})),
    "dtype": (changed(1, dtype="Half"), ("dtype", 5, {1})),
    "state": (changed(2, state="scheduled"), ("state", 5, {2})),
    "broadcast of another dtype": (of(3, "broadcast", output_dtypes=["Half"]), ("dtype", 5, {3})),
    "gather of another dtype": (of(3, "gather", input_dtypes=["Half"]), ("dtype", 5, {3})),
    "scatter of another dtype": (of(3, "scatter", output_dtypes=["Half"]), ("dtype", 5, {3})),
    "broadcast from another dtype": (of(3, "broadcast", input_dtypes=["Half"]), None),
    "gathered": (gathers([[32]]), None),
    "gathered wrong": (gathers([[31]]), ("size", 7, {1, 2, 3})),
    "exchanged": (exchanges(9), None),
    "exchanged wrong": (exchanges(2), ("size", 7, {0, 1, 2, 3})),
}
KINDS = {
    "COLLECTIVE_TYPE_MISMATCH": "operation",
    "SIZE_OR_SYNTAX_MISMATCH": "size",
    "COLLECTIVE_DTYPE_MISMATCH": "dtype",
    "COLLECTIVE_STATE_MISMATCH": "state",
}


def verdict(folder: Path) -> tuple[str, int, set[int]] | None:
    """The kind, number and ranks of the first mismatch of the first group; stuck is none."""
    problems = [problem for problem in page(folder).figures["problems"] if problem["kind"] != "stuck"]
    return (problems[0]["kind"], problems[0]["number"], set(problems[0]["ranks"])) if problems else None


def verdict_of_torch(folder: Path) -> tuple[str, int, set[int]] | None:
    from torch.distributed.flight_recorder.components import builder, config_manager, loader

    args = config_manager.JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"])
    try:
        details, version = loader.read_dir(args)  # it stops the garbage collector
    finally:
        gc.enable()
    for found in builder.build_db(dict(sorted(details.items())), args, version).collectives:
        if found.missing_ranks:
            return "missing", found.collective_seq_id, set(found.missing_ranks)
        if not found.pass_check:
            kinds = {KINDS[one.type_of_mismatch.state.name] for one in found.mismatch_collectives.values()}
            assert len(kinds) == 1
            return kinds.pop(), found.collective_seq_id, set(found.mismatch_collectives)
    return None


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_verdict_is_that_of_torch(name, tmp_path):
    entries, expected = SCENARIOS[name]
    folder = written(tmp_path, entries)
    assert verdict(folder) == expected
    same_verdict(folder, len(entries))


def same_verdict(folder: Path, ranks: int) -> None:
    """torch compares with the first rank, so that its culprits may be all others instead of the one that differs; of an
    all-to-all it names the first rank."""
    ours, theirs = verdict(folder), verdict_of_torch(folder)
    assert (ours and ours[:2]) == (theirs and theirs[:2])
    if ours is not None:
        everyone = set(range(ranks))
        assert theirs[2] in (ours[2], everyone - ours[2]) or ours[2] == everyone


@pytest.mark.parametrize("seed", range(30))
def test_the_verdict_is_that_of_torch_for_any_fault(seed, tmp_path):
    generator = random.Random(seed)
    ranks, calls = generator.randrange(2, 7), generator.randrange(2, 9)
    entries = job(ranks, calls)
    rank, number = generator.randrange(ranks), generator.randrange(calls)
    fault = generator.choice(["missing", "size", "operation", "dtype", "state"])
    if fault == "missing":
        del entries[rank][number:]
    elif fault == "operation":
        entries[rank][number] = call(number + 1, generator.choice(["broadcast", "reduce", "all_to_all"]))
    else:
        change = {"size": {"sizes": [[9]]}, "dtype": {"dtype": "Long"}, "state": {"state": "started"}}[fault]
        entries[rank][number] = call(number + 1, **change)
    folder = written(tmp_path, entries)
    assert verdict(folder)[:2] == (fault, number + 1)
    same_verdict(folder, ranks)


# ---- what the page says


def test_a_missing_rank_is_named_with_the_line_of_the_script(tmp_path):
    found = page(written(tmp_path, missing()))
    assert found.title == "4 dumps of the flight recorder · all 4 ranks · version 2.10"
    (finding,) = found.findings
    assert finding.title == "rank 1 never called all_reduce #4 (train.py:88) of group 0 (default_pg)"
    assert finding.evidence == (
        "ranks 0, 2, 3 called it (3 started); rank 1 called all_reduce #3 (train.py:88) of group 0 last, completed"
    )
    assert finding.ranks == (1,)
    assert found.tables[0].rows == (("group 0 (default_pg)", "4", "#3 to #4", "all_reduce #4: missing"),)
    assert found.tables[1].rows[0] == ("1", "all_reduce #3", "group 0", "completed", "train.py:88")


def test_a_rank_that_waits_in_another_group_is_explained_by_the_order(tmp_path):
    """Ranks 0 and 1: one calls tp, then the world; the other the world, then tp."""
    groups = {WORLD: (0, 1), TENSOR: (0, 1)}
    tensor = call(1, state="scheduled", process_group=TENSOR, pg_id=1, line=12)
    folder = write(tmp_path, {0: dump([call(1, state="started")], groups), 1: dump([tensor], groups)})
    found = page(folder)
    assert [finding.name for finding in found.findings] == ["missing_in_collective"] * 2
    assert all(
        finding.fix == "call the collectives of all groups in the same order on every rank"
        for finding in found.findings
    )
    assert {problem["group"] for problem in found.figures["problems"]} == {"0", "1"}


def test_the_cause_comes_before_what_waits_for_it(tmp_path):
    """Rank 3 misses a collective of its pair, so rank 2 waits there, and ranks 0 and 1 wait for both in the world."""
    pair = ("2", "pair")
    entries = {rank: [call(1), call(2, state="started")] for rank in (0, 1)}
    entries[2] = [call(1), call(1, state="started", process_group=pair, pg_id=2, line=40)]
    entries[3] = [call(1)]
    groups = {rank: {WORLD: range(4)} | ({pair: (2, 3)} if rank > 1 else {}) for rank in entries}
    found = page(write(tmp_path, {rank: dump(calls, groups[rank]) for rank, calls in entries.items()}))
    assert [finding.title for finding in found.findings] == [
        "rank 3 never called all_reduce #1 (train.py:40) of group 2 (pair)",
        "ranks 2, 3 never called all_reduce #2 (train.py:88) of group 0 (default_pg)",
    ]


def test_of_several_missing_ranks_the_one_that_waits_for_no_other_is_to_be_looked_at(tmp_path):
    """Rank 1 waits for rank 2 in their pair, so that it misses the call of the world as well; rank 2 does neither."""
    pair = ("2", "pair")
    entries = {rank: [call(1), call(2, state="started")] for rank in (0, 3)}
    entries[1] = [call(1), call(1, state="started", process_group=pair, pg_id=2, line=40)]
    entries[2] = [call(1)]
    groups = {rank: {WORLD: range(4)} | ({pair: (1, 2)} if rank in (1, 2) else {}) for rank in entries}
    found = page(write(tmp_path, {rank: dump(calls, groups[rank]) for rank, calls in entries.items()}))
    (world,) = [finding for finding in found.findings if "default_pg" in finding.title]
    assert world.ranks == (1, 2)
    assert "look at what rank 2 does after that call" in world.fix


def test_of_a_group_whose_ranks_are_not_recorded_nobody_is_known_to_be_complete(tmp_path):
    """Dumps of gloo have no groups: rank 0 waits for rank 1 in their pair, and the others in the world for rank 0."""
    pair = ("1", "pair")
    content = {rank: dump([call(1), call(2, state="scheduled")], {("", ""): (rank,)}) for rank in range(3)}
    content[0]["entries"][1:] = [call(1, state="scheduled", process_group=pair, pg_id=1)]
    content[2]["entries"] = []
    found = page(write(tmp_path, content))
    assert [(problem["kind"], problem["ranks"]) for problem in found.figures["problems"]] == [
        ("missing", [2]),
        ("undecided", []),
    ]
    assert found.findings[1].title == (
        "all_reduce #1 (train.py:88) of group 1 (pair) did not complete, and the dumps do not say which ranks are in"
        " this group"
    )


def test_a_missing_rank_comes_before_a_collective_in_different_states(tmp_path):
    """Rank 1 has started #3, which the others have completed, and never called #5."""
    entries = job(3, calls=5)
    entries[1] = [call(1), call(2), call(3, state="started"), call(4, state="scheduled")]
    found = page(written(tmp_path, entries))
    assert [finding.title for finding in found.findings] == [
        "rank 1 never called all_reduce #5 (train.py:88) of group 0 (default_pg)",
        "all_reduce #3 (train.py:88) of group 0 (default_pg) is only started on rank 1",
    ]


def message(number: int, name: str, state: str = "started", sizes: tuple[int, ...] = (8,)) -> dict[str, Any]:
    which = {"is_p2p": True, "p2p_seq_id": number, "collective_seq_id": 0, "process_group": PIPELINE, "pg_id": 3}
    return call(number, name, state, sizes=[[*sizes]], line=70, **which)


@pytest.mark.parametrize(
    ("receiver", "title"),
    [
        ([], "rank 5 never called recv for send 0->1 #2 (train.py:70) of group 3 (pp)"),
        ([message(2, "recv 1<-0")], None),
        (
            [message(2, "recv 1<-0", sizes=(9,))],
            "rank 5 called send 0->1 #2 (train.py:70) of group 3 (pp) with another size",
        ),
    ],
)
def test_a_message_that_nobody_receives(receiver, title, tmp_path):
    """Ranks 4 and 5 are stages 0 and 1; the first message was coalesced, and only the end of its group is completed."""
    done = [message(1, "coalesced", "completed")]
    groups = {PIPELINE: (4, 5)}
    sender = [message(1, "send 0->1", "scheduled"), *done, message(2, "send 0->1")]
    content = {4: dump(sender, groups), 5: dump([message(1, "recv 1<-0", "scheduled"), *done, *receiver], groups)}
    assert [finding.title for finding in page(write(tmp_path, content)).findings] == (
        [title] if title is not None else []
    )


@pytest.mark.parametrize(("state", "cause"), [("started", "a link, a network card"), ("scheduled", "earlier kernels")])
def test_all_ranks_are_stuck_in_one_collective(state, cause, tmp_path):
    entries = job(2)
    for calls in entries.values():
        calls.append(call(7, state=state))
    (finding,) = page(written(tmp_path, entries)).findings
    assert finding.title.startswith(f"all_reduce #7 (train.py:88) of group 0 (default_pg) was {state} on every rank")
    assert cause in finding.cause


def test_a_rank_without_a_dump_is_not_blamed(tmp_path):
    found = page(written(tmp_path, missing(), without=(1,)))
    (finding,) = found.findings
    assert finding.title == (
        "all_reduce #4 (train.py:88) of group 0 (default_pg) did not complete, and rank 1 left no dump"
    )
    assert "There is no dump of rank 1, so it is not known which collectives they called." in found.notes


def test_json_has_the_same_problems_and_no_lines(tmp_path):
    for rank, calls in missing().items():
        content = dump(
            [{key: value for key, value in entry.items() if key != "frames"} for entry in calls], {WORLD: range(4)}
        )
        (tmp_path / f"dump_{rank}.json").write_text(json.dumps(content), encoding="utf-8")
    assert verdict(tmp_path) == ("missing", 4, {1})
    assert any("No dump has stacks" in note for note in page(tmp_path).notes)


def test_calls_that_the_buffer_has_overwritten_are_not_missing(tmp_path):
    content = {rank: dump(calls, {WORLD: range(2)}) for rank, calls in job(2).items()}
    content[1]["entries"] = []
    content[1]["pg_status"] = {"0": {"last_enqueued_collective": 6, "last_completed_collective": 6}}
    assert verdict(write(tmp_path, content)) is None


def test_a_damaged_dump_among_others_is_left_out(tmp_path):
    folder = written(tmp_path, missing())
    path = folder / "nccl_trace_rank_3"
    path.write_bytes(path.read_bytes()[:300])
    found = page(folder)
    assert found.figures["problems"][0]["ranks"] == [1]
    assert any(note.startswith(f"Left out: {path} is not opened") for note in found.notes)
    with pytest.raises(ForeignError, match="damaged, or not complete"):
        page(path)


@pytest.mark.thorough
def test_128_ranks_take_less_than_10_seconds(tmp_path):
    entries = job(128, calls=500)
    entries[77] = entries[77][:-1]
    folder = written(tmp_path, entries)
    began = time.process_time()
    assert verdict(folder) == ("missing", 500, {77})
    assert time.process_time() - began < 10


# ---- hostile files


class Runs:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_executed(protocol, tmp_path):
    trap = tmp_path / "trap"
    content = dump([Runs(os.mkdir, str(trap))], {WORLD: [0]})
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ForeignError, match="it would import or call something") as caught:
        page(path)
    assert str(path) in str(caught.value)
    assert not trap.exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_by_pickle(protocol):
    value = {
        "a": [1, -1, 255, 65_536, 1 << 62, -(1 << 62), 1.5, None, True, False, "é" * 300, ""],
        "b": ((), (1,), (1, 2, 3, 4)),
    }
    value |= {"shared": [value["a"], value["a"]], "empty": [{}, []], 7: [list(range(3000))]}
    assert plain_pickle(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x80\x02", "not complete"),
        (b"\x80\x02]r\xff\xff\xff\xff.", None),  # an index of the memo that would take 32 GiB in an array
        (b"\x80\x02]q\x00h\x01.", "damaged"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "damaged"),
        (b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".", "an integer of 255 bytes"),
        (b"\x80\x02}]K\x01s.", "keys are no texts"),
        (b"\x80\x02\x88\x88.", "damaged"),
        (b"\x80\x02cos\nsystem\n.", "import or call"),
        (b"\x80\x02\xfe.", "unknown opcode 254"),
    ],
)
def test_damaged_pickles(data, says):
    if says is None:
        assert plain_pickle(data) == []
        return
    with pytest.raises(NoPlainPickle, match=says):
        plain_pickle(data)


@pytest.mark.parametrize("suffix", ["", ".json"])
def test_mutated_dumps_never_crash(suffix, tmp_path):
    generator = random.Random(11)
    content = dump(missing()[0], {WORLD: range(4)})
    plain = json.dumps(content).encode() if suffix else pickle.dumps(content, protocol=2)
    tokens = [b"null", b"N", b"\x88", b"K\x05", b"(", b"]", b"}", b"u.", b'"', b"-1", b"\xff", b"[]", b"9" * 20]
    other = write(tmp_path / "others", {1: dump(job(4)[1], {WORLD: range(4)})}) / "nccl_trace_rank_1"
    for number in range(100):
        data = bytearray(plain)
        for _ in range(generator.randrange(1, 6)):
            at = generator.randrange(2, len(data))
            data[at : at + generator.randrange(6)] = generator.choice(tokens)
        path = tmp_path / f"dump_{number}{suffix}"
        path.write_bytes(bytes(data))
        try:
            json.dumps([found.figures for found in opening.explain([path, other])])
        except ForeignError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_values_of_wrong_types_are_read_as_unknown(tmp_path):
    wrong = [None, 7, -(1 << 70), "x", [], [[]], [None], {}, {"a": [1]}, True, 1.5]
    entries = [call(1) | {field: value} for field in call(1) for value in wrong]
    deep: list[Any] = []
    deep.append(deep)
    entries += [call(2, sizes=deep), call(3, frames=deep), call(4, process_group=deep), 7, None, deep]
    content = {
        "version": deep,
        "pg_config": {"0": deep, "1": {"ranks": deep}},
        "pg_status": {"0": deep},
        "entries": entries,
    }
    found = page(write(tmp_path, {0: content, 1: dump([call(1)], {WORLD: [0, 1]})}))
    json.dumps(found.figures)
    assert any("not of version 2" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a_0", pickle.dumps([1], protocol=2), "has no list entries"),
        ("a_0.json", b'{"entries": 7}', "has no list entries"),
        ("a_0.json", b'{"entries": [' + b"[" * 100_000, "is not JSON"),
        ("a.json", b'{"entries": []}', "does not say of which rank it is"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_sentence(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ForeignError, match=says):
        page(tmp_path / name)


# ---- other layouts


def test_dumps_of_older_layouts(tmp_path):
    """Before version 2.1 an entry has one number, and the number of its group instead of its name; torch 2.1 wrote a
    list of entries."""
    new = ("process_group", "collective_seq_id", "p2p_seq_id", "op_id", "is_p2p", "timeout_ms")
    old = {
        rank: [{key: value for key, value in call.items() if key not in new} for call in calls]
        for rank, calls in missing().items()
    }
    for calls in old.values():
        for number, entry in enumerate(calls, start=1):
            entry["seq_id"] = number
    for name, dumps in {
        "1.5": {r: {"version": "1.5", "entries": calls} for r, calls in old.items()},
        "list": old,
    }.items():
        (finding,) = page(write(tmp_path / name, dumps)).findings
        assert (finding.name, finding.ranks) == ("missing_in_collective", (1,))
        assert finding.title == "rank 1 never called all_reduce #4 (train.py:88) of group 0"


@pytest.mark.parametrize(
    ("entries", "note"),
    [
        (job(2), "All recorded calls have completed: "),
        ({0: [], 1: []}, "No call is recorded: set TORCH_FR_BUFFER_SIZE"),
    ],
)
def test_dumps_in_which_no_rank_waits(tmp_path, entries, note):
    found = page(written(tmp_path, entries))
    assert not found.findings and any(said.startswith(note) for said in found.notes)
