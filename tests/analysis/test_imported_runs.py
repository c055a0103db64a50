"""Runs made from files of jobs that ran elsewhere: what is recorded, what is unknown, and what changed between two."""

from __future__ import annotations

import json
import random
import stat
import time
from pathlib import Path

import pytest
from chrome_traces import job, kernel, steps_of, trace, write
from commands import called
from flight_dumps import WORLD, call, dump
from flight_dumps import write as write_dumps
from foreign import command, everything

import labkit
from labkit.analysis.changes import of_folders
from labkit.analysis.foreign import ForeignError
from labkit.analysis.profiled import parts
from labkit.analysis.summary import recorded_summary
from labkit.common.files import write_atomically
from labkit.figures.charts import timeline
from labkit.figures.machine import scene
from labkit.record.folder import RunFolder
from labkit.record.follow import Follower, Recording
from labkit.record.state import RunState


def kept(*paths: Path, name: str = "job") -> RunFolder:
    return RunFolder.find(labkit.explain(*paths, keep=name).run)


def read(folder: RunFolder) -> RunState:
    follower = Follower(folder)
    follower.poll()
    return follower.state


# ---- what is recorded


def test_steps_phases_and_collectives_of_every_rank(tmp_path):
    folder = kept(job(tmp_path / "job"))
    state = read(folder)
    assert (state.over, state.words, state.world_size) == (True, "imported, not launched here", 2)
    for rank in state.ranks.values():
        assert (rank.host, rank.device, rank.device_name) == ("node-7", "cuda", "NVIDIA H100")
        assert [*rank.steps.step] == [4, 5]
        assert [*rank.steps.seconds] == pytest.approx([840e-6] * 2)
        assert [*rank.steps.phases["forward"]] == pytest.approx([100e-6] * 2)
        assert [*rank.steps.phases["backward"]] == pytest.approx([700e-6] * 2, rel=1e-3)
        assert [*rank.steps.phases["optimizer"]] == pytest.approx([40e-6] * 2, rel=1e-3)
        measured = parts(rank.timelines[5])
        assert measured["compute"] == pytest.approx(640e-6)
        assert measured["exposed communication"] == pytest.approx(150e-6)
        assert measured["idle"] == pytest.approx(50e-6)
        [call] = rank.timelines[5].comm
        assert (call.op, call.bytes, call.ranks, call.seq) == ("all_reduce", 4000, [0, 1], 1)
        assert rank.bytes_per_step == 4000
    assert state.ranks[0].steps.t[0] == pytest.approx(1_700_000_000, abs=1)


def test_what_the_files_do_not_have_is_unknown_and_not_zero(tmp_path):
    summary = recorded_summary(kept(job(tmp_path / "job")))
    rank = summary.ranks[0]
    unknown = (summary.loss, summary.samples_per_second, summary.accuracy, summary.mfu, rank.exit_code)
    assert {*unknown, rank.peak_memory_bytes, rank.phase_seconds["data"], rank.phase_seconds["copy"]} == {None}
    assert rank.step_seconds_median == pytest.approx(840e-6)


def test_only_ranks_with_a_file_have_rows(tmp_path):
    folder = kept(job(tmp_path / "job") / "rank1.json.gz")
    assert read(folder).world_size == 2
    assert [rank.rank for rank in recorded_summary(folder).ranks] == [1]


def test_findings_are_those_about_the_job(tmp_path):
    path = job(tmp_path / "job", (500, 900))
    told = [finding.title for finding in labkit.explain(path).findings]
    assert told and [finding.title for finding in recorded_summary(kept(path)).findings] == told


def test_folder_is_private_and_names_its_job(tmp_path):
    folder = kept(job(tmp_path / "job"))
    for path in (folder.path, *folder.path.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert folder.read_imported().sources == ["rank0.json.gz", "rank1.json.gz"]


def test_profile_without_steps_is_one_step(tmp_path):
    write(tmp_path / "rank0.json", trace([kernel(10, 100), kernel(200, 50)]))
    state = read(kept(tmp_path / "rank0.json"))
    assert [*state.ranks[0].steps.seconds] == pytest.approx([240e-6])


def test_dumps_of_the_flight_recorder_are_a_time_line_of_collectives(tmp_path):
    begun = 1_795_772_571_000_000_000

    def called(number: int, rank: int, over: bool = True) -> dict:
        at = begun + number * 20_000_000 + rank * 1_000_000
        ended = at + 5_000_000 if over else None
        state = "completed" if over else "started"
        return call(number, state=state, time_created_ns=at, time_discovered_completed_ns=ended)

    calls = {rank: [called(1, rank), called(2, rank)] for rank in range(3)}
    for rank in (0, 2):
        calls[rank].append(called(3, rank, over=False))
    folder = kept(
        write_dumps(tmp_path / "dumps", {rank: dump(those, {WORLD: range(3)}) for rank, those in calls.items()})
    )
    state = read(folder)
    one = state.ranks[2].timelines[1]
    assert [(call.op, call.seq, call.ranks) for call in one.comm] == [
        ("all_reduce", number, [0, 1, 2]) for number in (1, 2, 3)
    ]
    assert [(call.start, call.end) for call in one.comm[:2]] == [
        (pytest.approx(2e-3, abs=1e-6), pytest.approx(7e-3, abs=1e-6)),
        (pytest.approx(22e-3, abs=1e-6), pytest.approx(27e-3, abs=1e-6)),
    ]
    assert one.comm[2].end == one.seconds == pytest.approx(42e-3 * 1.05, rel=1e-3)
    assert one.t0 == pytest.approx(begun * 1e-9 + 0.02, abs=1e-3)
    assert scene(state).what == timeline(state).title.lower() == "the recorded collectives"
    assert recorded_summary(folder).ranks[0].communication is None
    assert "Traceback" not in everything(folder)


def test_a_replay_says_that_it_was_not_launched(tmp_path):
    recording = Recording(kept(job(tmp_path / "job")))
    recording.seek(0.0)
    assert recording.state.words == "imported, not launched here"


def test_logs_become_ranks_with_their_findings(tmp_path):
    lines = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 88, in step\n'
    write_atomically(tmp_path / "job.out", f"[rank0]: step 1\n{lines}[rank1]: RuntimeError: shapes differ\n")
    state = read(kept(tmp_path / "job.out"))
    assert [*state.ranks] == [0, 1] and state.words == "imported, not launched here"
    [finding] = labkit.explain(tmp_path / "job.out").findings
    assert finding.title in " ".join(command("show", "job")[1].split())


def test_logged_steps_become_steps(tmp_path):
    told = "".join(f"[rank1]: step {step}: loss {4 / step:.4f}, step time: 0.5 s\n" for step in range(10, 60, 10))
    write_atomically(tmp_path / "job.out", f"[rank0]: no losses here\n{told}")
    state = read(kept(tmp_path / "job.out"))
    steps = state.ranks[1].steps
    assert [*steps.step] == [10, 20, 30, 40, 50] and len(state.ranks[0].steps) == 0
    assert steps.loss[0] == pytest.approx(0.4) and {*steps.seconds} == {0.5}
    assert "0.08" in command("show", "job")[1]


# ---- what cannot be kept


def test_runs_of_one_second_are_in_the_order_in_which_they_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20261128-114000")
    made = [kept(job(tmp_path / name), name=name).name for name in ("zebra", "ant", "bee")]
    assert [run.name for run in RunFolder.all()] == made


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 81, ".hidden"])
def test_names_that_no_folder_may_have(tmp_path, runs, name):
    with pytest.raises(ValueError, match="the name of a run has letters"):
        labkit.explain(job(tmp_path / "job"), keep=name)
    assert not runs.exists()


def test_two_files_of_one_rank_leave_no_folder(tmp_path, runs):
    path = job(tmp_path / "job")
    write(path / "again.json", trace(steps_of(1), rank=1))
    with pytest.raises(ForeignError, match=r"again.json and rank1.json.gz are both of rank 1"):
        kept(path)
    assert not runs.exists()


@pytest.mark.parametrize(
    "arguments", [("pack",), ("logs",), ("gather", "job", "-o", "out"), ("run", "ddp", "--resume"), ("capture",)]
)
def test_what_has_no_meaning_says_so_in_a_sentence(tmp_path, arguments):
    kept(job(tmp_path / "job"))
    code, said = command(*arguments[:1], *(arguments[1:] or ("job",)), *(("job",) if arguments[0] == "run" else ()))
    assert code and said.startswith("labkit: ") and said.count("\n") == 1, said


# ---- everything that runs have


def test_all_front_ends_show_it(tmp_path):
    said = everything(kept(job(tmp_path / "job")))
    assert "imported, not launched here" in said and "Traceback" not in said
    assert "step_seconds" in said and "all_reduce" in said


def test_zip_of_a_run_keeps_where_it_comes_from(tmp_path):
    from labkit.record.packed import recording

    assert any(path.endswith("/imported.json") for path in recording(kept(job(tmp_path / "job"))))


@pytest.mark.thorough
def test_damaged_files_and_folders_crash_nothing(tmp_path):
    """Mutated traces are kept or refused with one sentence; a mutated origin makes the folder unreadable or is read."""
    source = json.dumps(trace(steps_of(500)))
    generator = random.Random(7)
    for number in range(60):
        text = bytearray(source.encode())
        for _ in range(generator.randint(1, 6)):
            text[generator.randrange(len(text))] = generator.randrange(32, 127)
        path = tmp_path / f"{number}.json"
        path.write_bytes(bytes(text))
        code, said = command("explain", str(path), "--keep", f"job{number}")
        assert code in (0, 1) and "Traceback" not in said
        assert code == 0 or said.count("\n") == 2, said
    folder = RunFolder.all()[-1]
    for content in ("[]", '{"sources": [1]}', '{"sources": [], "findings": [{}]}', '{"sources": ["\\u0000"]}'):
        folder.imported.write_text(content)
        assert "imported.json" in folder.trouble()
        assert "Traceback" not in everything(folder)


# ---- what changed


def test_slower_rank_shows_as_computation_there_and_waiting_elsewhere(tmp_path):
    before = kept(job(tmp_path / "one"), name="before")
    after = kept(job(tmp_path / "two", (500, 800)), name="after")
    changed = of_folders(before, after)
    rows = {change.name: change for change in changed.parts}
    assert rows["step"].seconds == pytest.approx(150e-6)  # the mean of two ranks, one of which takes 300 µs longer
    assert rows["compute"].seconds == pytest.approx(150e-6)
    assert [change.seconds for change in changed.by_rank] == pytest.approx([0, 300e-6], abs=1e-9)
    assert changed.of_rank[1].name == "compute"
    assert [change.name for change in changed.steps] == ["4", "5"]
    [gemm] = changed.kernels
    assert "gemm" in gemm.name and gemm.seconds == pytest.approx(150e-6)
    assert "compute: +0.15 ms" in changed.sentence and "rank 1" in changed.sentence


def test_compare_prints_and_writes_what_changed(tmp_path, capsys):
    kept(job(tmp_path / "one"), name="before")
    kept(job(tmp_path / "two", (500, 800)), name="after")
    capsys.readouterr()
    assert called("compare", "before", "after") == 0
    shown = capsys.readouterr().out
    assert "The step of each rank" in shown and "Kernels that changed most" in shown
    assert called("compare", "before", "after", "--json") == 0
    found = json.loads(capsys.readouterr().out)["changes"]
    assert found["parts"][0] == pytest.approx(
        {"name": "step", "before": 840e-6, "after": 990e-6, "count_before": None, "count_after": None, "change": 150e-6}
    )


def test_different_jobs_are_not_subtracted(tmp_path):
    whole = kept(job(tmp_path / "one"), name="two")
    write(tmp_path / "alone.json", trace(steps_of(500), world_size=1))
    said = of_folders(whole, kept(tmp_path / "alone.json", name="one")).sentence
    assert said == "What changed from two to one is not known: one is of 2 ranks and the other one of 1."


MOMENT = 1_795_772_571_000_000_000  # ns since 1970


def recorded_calls(folder: Path, seconds: float, apart: float, replaced: int = 0) -> Path:
    """Dumps of two ranks with ten calls, each of which takes `seconds`, `apart` from each other, the last without an
    end; rank 1 calls a broadcast in the place of `replaced`."""
    entries: dict[int, list] = {0: [], 1: []}
    for rank, calls in entries.items():
        for number in range(1, 11):
            begun, done = MOMENT + int(number * apart * 1e9), number < 10
            ended = begun + int(seconds * 1e9) if done else None
            op = "broadcast" if (rank, number) == (1, replaced) else "all_reduce"
            state = "completed" if done else "started"
            calls.append(call(number, op, state, time_created_ns=begun, time_discovered_completed_ns=ended))
    return write_dumps(folder, {rank: dump(calls, {WORLD: (0, 1)}) for rank, calls in entries.items()})


def test_collectives_of_two_dumps_are_compared(tmp_path):
    before = kept(recorded_calls(tmp_path / "one", 0.002, 0.020), name="before")
    after = kept(recorded_calls(tmp_path / "two", 0.003, 0.030, replaced=7), name="after")
    changed = of_folders(before, after)
    operations = {change.name: change for change in changed.operations}
    reduced = operations["all_reduce in default_pg"]
    assert (reduced.before, reduced.after) == pytest.approx((0.002, 0.003), rel=1e-3)
    assert (reduced.count_before, reduced.count_after) == (9, 8.5)  # the tenth has not ended
    assert changed.gap.seconds == pytest.approx(0.010, rel=1e-3)
    assert {change.name for change in changed.single} == {
        f"all_reduce #{number} in default_pg" for number in range(1, 10)
    }
    assert (
        "The first call that is another one is all_reduce #7 in default_pg, in whose place rank 1" in changed.sentence
    )
    assert "is of the same" not in of_folders(before, kept(tmp_path / "one", name="again")).moved
    json.dumps(changed.to_json())


def test_dumps_without_ends_say_so(tmp_path):
    """Those of gloo."""
    for name in ("one", "two"):
        kept(recorded_calls(tmp_path / name, 0, 0.020), name=name)
    assert "When calls ended is not in these dumps." in of_folders(*map(RunFolder.find, ("one", "two"))).sentence


def test_steps_of_two_logs_are_compared(tmp_path):
    for name, seconds in (("one", 0.25), ("two", 0.5)):
        lines = [f"[rank{rank}]: step {step}: loss 2.0, step time: {seconds} s" for step in range(5) for rank in (0, 1)]
        (tmp_path / f"{name}.log").write_text("\n".join(lines), encoding="utf-8")
        kept(tmp_path / f"{name}.log", name=name)
    changed = of_folders(*map(RunFolder.find, ("one", "two")))
    assert changed.sentence.startswith("A step takes 500 ms in two and 250 ms in one: +250 ms (+100 %).")
    assert [change.name for change in changed.by_rank] == ["rank 0", "rank 1"]
