"""Findings in general: what was not recorded, and arbitrary input."""

from __future__ import annotations

import json
import math

import pytest
from diagnosed import (
    CUDA_FULL,
    MIB,
    activity,
    batches,
    ddp,
    end,
    epoch,
    error,
    first,
    fold,
    loader,
    memory,
    names,
    op,
    saw,
    script,
    spec,
    start,
    status,
    steps,
    timeline,
    traffic,
    waiting,
)
from folded import apply

from labkit.analysis.diagnose import findings
from labkit.record.documents import plain
from labkit.record.events import Save
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower
from labkit.record.state import RunState
from labkit.record.writer import Writer

# ---- what was not recorded


def test_a_part_of_the_probe_that_failed():
    lost = {"kind": "probe_error", "t": 3.0, "rank": 1, "part": "memory", "type": "KeyError", "message": "x"}
    found = first(fold(spec(), start(0, 1), lost), "not_watched")
    assert found.ranks == (1,) and "memory on rank 1" in found.title and found.evidence == "KeyError: x"


def test_a_name_that_torch_lacks_is_one_finding_for_all_ranks():
    message = "torch 9.9 has no torch.autograd._profiler_enabled: steps are not profiled"
    lost = {"kind": "probe_error", "t": 3.0, "part": "timelines", "type": "MissingName", "message": message}
    state = fold(spec(), start(0, 1), lost | {"rank": 0}, lost | {"rank": 1})
    (found,) = [finding for finding in findings(state) if finding.name == "not_watched"]
    assert found.title == "the probe lacks timelines on ranks 0, 1" and found.evidence == message
    assert "does not have" in found.cause and found.ranks == (0, 1)


def test_a_rank_that_left_nothing():
    found = first(fold(spec(nproc=4), start(0, 1, 3), status("stopped")), "not_there")
    assert found.ranks == (2,) and "3 of 4 ranks" in found.evidence
    assert first(fold(spec(), status("finished")), "not_there").ranks == (0, 1)
    assert names(fold(spec(nproc=4), start(0), status("running"))) == []  # the others may yet come
    assert names(fold(spec(nproc=4), status("stopped"))) == []  # before any had begun


def test_events_that_break_off():
    whole, cut = [*start(0), *steps(0, 50), end(0)], [*start(1), *steps(1, 20)]
    found = first(fold(spec(), whole, cut, status("finished")), "cut_short")
    assert found.ranks == (1,) and "1: 20; other ranks: 50" in found.evidence
    for healthy in (status("running"), status("stopped"), [end(1), status("finished")]):
        assert names(fold(spec(), whole, cut, healthy)) == []


def followed(tmp_path, *ranks: int, break_off: int = 0, spoil: int = 0) -> RunState:
    """The folder of a finished run of three ranks, with the events of some, read as by a front end."""
    folder = RunFolder.create("ddp-x3", tmp_path)
    RunFolder.write_json(folder.spec, spec(nproc=3)["spec"])
    RunFolder.write_json(folder.status, {"state": "finished", "started": 1.0, "ended": 900.0})
    for rank in ranks:
        writer = Writer(folder.events_of(rank), rank)
        for event in [*start(rank), *steps(rank, 30), end(rank)]:
            writer.write(
                event["kind"], **{name: value for name, value in event.items() if name not in ("kind", "rank")}
            )
        writer.close()
    path = folder.events_of(1)
    if break_off:
        for cut in (path, path.with_suffix(".steps")):
            cut.write_bytes(cut.read_bytes()[:-break_off])
    if spoil:
        lines = path.read_bytes().split(b"\n")
        lines[1:1] = [b"{", b"\xff\xfe\x00", b"[]", b'{"kind":"step","t":1.0,"rank":1}'][:spoil]
        path.write_bytes(b"\n".join(lines))
    follower = Follower(folder)
    follower.poll()
    return follower.state


def test_a_whole_folder_has_no_finding(tmp_path):
    assert names(followed(tmp_path, 0, 1, 2)) == []


def test_a_folder_without_a_rank(tmp_path):
    state = followed(tmp_path, 0, 2)
    assert names(state) == ["not_there"] and findings(state)[0].ranks == (1,)


def test_a_folder_that_was_cut_short(tmp_path):
    state = followed(tmp_path, 0, 1, 2, break_off=100)
    assert names(state) == ["cut_short"] and findings(state)[0].ranks == (1,)


def test_a_folder_with_lines_that_are_no_events(tmp_path):
    state = followed(tmp_path, 0, 1, 2, spoil=4)
    assert names(state) == ["not_readable"] and findings(state)[0].title.startswith("4 lines of the run's events")


def test_an_empty_folder(tmp_path):
    assert first(followed(tmp_path), "not_there").ranks == (0, 1, 2)


# ---- arbitrary input


def test_nothing_is_found_in_nothing():
    assert findings(RunState()) == () == findings(fold(spec())) == findings(fold(script()))


def everything() -> list[dict]:
    """Events of every kind that a rule reads, in a run that failed while it hung."""
    return [
        spec(nproc=3, device="cuda", batch_size=64),
        *start(0, 1, 2, device="cuda:1"),
        {"kind": "system", "t": 1.0, "gpus": [{"index": 1, "memory_used": 15 << 30, "memory_total": 16 << 30}]},
        *steps(0, 8, data=0.2),
        *steps(1, 8, loss=math.nan),
        *(
            event
            for rank in (0, 1, 2)
            for event in [*ddp(rank), *batches(rank, "a"), loader(rank, 5 + rank), timeline(rank)]
        ),
        epoch(0, 0, 0),
        epoch(0, 0, 0),
        saw(0, "item", calls=20, steps=20),
        saw(0, "save", path="model.pt", step=5),
        saw(1, "save", path="model.pt", step=5),
        activity(0, "evaluating"),
        activity(1, "training"),
        traffic(0, all_reduce=(16, 4 * MIB)),
        memory(0, 200 * MIB, activations=150 * MIB),
        waiting(0, op(), step=8, at=(129, "evaluate")),
        waiting(2, op("barrier", sizes=()), step=8),
        {"kind": "probe_error", "t": 3.0, "rank": 1, "part": "memory", "type": "KeyError", "message": "x"},
        error(1, CUDA_FULL, "OutOfMemoryError", owners={"activations": 9 << 30}, ops=[op()]),
        status("failed", rank1=1, rank2=-15),
    ]


def paths(value, at=()):
    """Every path in nested dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*at, name)
        yield from paths(one, (*at, name))


def changed(value, at, junk):
    """A copy with `junk` at one path; Ellipsis removes the value."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(at) > 1:
        copy[at[0]] = changed(copy[at[0]], at[1:], junk)
    elif junk is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = junk
    return copy


def test_everything_at_once_is_read():
    found = names(fold(everything()))
    assert found[0] == "out_of_memory" and {
        "nan_loss",
        "same_samples",
        "one_file",
        "input_bound",
        "small_buckets",
    } <= set(found)
    assert "not_judged" not in found


@pytest.mark.thorough
@pytest.mark.parametrize("junk", [..., None, "", "x", -1, 1e308, [], {}, [[]], {"x": {}}, True], ids=repr)
def test_no_event_makes_the_diagnosis_raise(junk):
    events = everything()
    sorts = {(event["kind"], event.get("what")): number for number, event in enumerate(events)}
    for number in sorts.values():
        for at in paths(events[number]):
            if at[0] in ("kind", "phases", "comm", "marks"):
                continue  # without a kind it is no event, and spans are for the fold to refuse
            found = findings(fold(events[:number], changed(events[number], at, junk), events[number + 1 :]))
            json.dumps([plain(one.recorded()) for one in found])
            assert found, (events[number], at)


def test_what_could_not_be_judged_is_said_and_the_rest_stands():
    state = fold(spec(), start(0, 1, device="cuda:0"), saw(0, "item", calls=20, steps=20))
    apply(state, Save(t=1.0, rank=0, path=["x"], step=5))  # which the check on reading would have refused
    assert names(state) == ["synchronised", "not_judged"]
    found = findings(state)[-1]
    assert found.title.startswith("1 of") and "one_file (TypeError: " in found.evidence and found.kind == "unseen"


@pytest.mark.parametrize("missing", ["sizes", "ranks", "over", "op", "seq", "group"])
def test_a_wait_is_told_without_a_field_of_an_operation(missing):
    bare = {name: value for name, value in op().items() if name != missing}
    found = names(fold(spec(), start(0, 1), waiting(0, bare)))
    assert "hang" in found and "not_judged" not in found


def test_more_ranks_than_were_seen():
    state = fold(spec(nproc=64), start(0), steps(0), waiting(0, op(ranks=range(64)), step=12), batches(0, "a"))
    found = first(state, "hang")
    assert len(found.ranks) == 64 and "rank 63: has not started" in found.evidence
