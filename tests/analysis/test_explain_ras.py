"""Reports of NCCL's RAS service, written after NCCL's source and user guide, because no NCCL runs here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from flight_dumps import WORLD, call, dump
from ras_server import communicator, gpu, group, missing, rank, report, text

from labkit.analysis.foreign import ForeignError, Page, opening

DEAD = "did not answer and is considered dead"


def explained(content: str | bytes, folder: Path, name: str = "report.txt") -> Page:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (page,) = opening.explain([path])
    assert page.figures["kind"] == "ras"
    return page


# ---- JSON


def test_a_healthy_job_has_no_finding(tmp_path):
    page = explained(report(communicator([rank(number) for number in range(4)])), tmp_path)
    assert page.title == "1 report of NCCL's RAS · NCCL 2.29.1 · 1 communicator · 2026-11-27 13:06:53"
    assert not page.findings and page.tables[0].rows == (("0xae94423cfbb2ef4a", "4", "0", "0", "–"),)


def test_a_rank_that_launched_fewer_collectives_is_behind(tmp_path):
    page = explained(report(communicator([rank(0), rank(1, 55), rank(2), rank(3)])), tmp_path)
    (found,) = page.findings
    assert found.name == "ras_behind" and found.ranks == (1,)
    assert found.title == "rank 1 of communicator 0xae94423cfbb2ef4a of 4 ranks is 2 AllReduce behind"
    assert found.evidence == "rank 1 has launched 55 AllReduce, ranks 0, 2, 3 57"


def test_processes_without_an_answer_come_first_and_once(tmp_path):
    first = communicator([rank(0), rank(1, 56)], [missing(2, dead=True), missing(3)])
    second = communicator([rank(0), rank(1)], [missing(2, dead=True), missing(3)], "0xb")
    page = explained(report(first, second, timeouts=2), tmp_path)
    gone, behind = page.findings
    assert gone.name == "ras_no_answer" and gone.ranks == (2, 3) and "kill -CONT" in gone.fix
    assert f"rank 2 {DEAD} (process 102 on 172.16.64.213, GPU 2)" in gone.evidence
    assert "rank 3 did not answer (process 103" in gone.evidence and "1 other communicator" in gone.evidence
    assert behind.name == "ras_behind" and behind.ranks == (1,)
    assert "RAS waited in vain for an answer 2 times." in page.notes


def test_errors_and_different_states(tmp_path):
    ranks = [rank(0), rank(1, async_error=6), rank(2), rank(3, init_state=7)]
    failed, state = explained(report(communicator(ranks)), tmp_path).findings
    assert failed.name == "ras_error" and "rank 1 reported Remote process error (process 101" in failed.evidence
    assert state.evidence == "rank 3 has status INIT, ranks 0, 1, 2 have status RUNNING"


def test_a_rank_that_answers_and_is_no_member_is_not_missing(tmp_path):
    page = explained(report(communicator([rank(0), rank(1)], [missing(2, unresponsive=False)])), tmp_path)
    (found,) = page.findings
    assert found.evidence == "rank 2 has status NOCOMM, ranks 0, 1 have status RUNNING"


def test_of_several_reports_the_newest_counts(tmp_path):
    (tmp_path / "a.json").write_text(report(communicator([rank(0), rank(1)]), time="2026-11-27 14:00:00"))
    (tmp_path / "b.json").write_text(report(communicator([rank(0), rank(1, 9)]), time="2026-11-27 13:00:00"))
    (page,) = opening.explain([tmp_path])
    assert not page.findings and "Of 2 reports, the newest is explained: a.json." in page.notes


def test_a_dump_of_the_flight_recorder_is_still_one(tmp_path):
    fields = {"nccl_version": "2.29.1"} | dump([call(1)], {WORLD: [0]})
    (tmp_path / "trace_0").write_text(json.dumps(fields))
    (page,) = opening.explain([tmp_path / "trace_0"])
    assert page.figures["kind"] == "flight_recorder"


# ---- text


def test_the_text_of_a_healthy_job(tmp_path):
    page = explained(text(group(0, 8, 4) + group(1, 1, 32)), tmp_path)
    assert page.title == "1 report of NCCL's RAS · NCCL 2.26.2 · 9 communicators"
    assert not page.findings
    assert page.notes == ["RAS found nothing wrong with 8 communicators of 4, 1 communicator of 32 ranks."]


@pytest.mark.parametrize(("operation", "version"), [("AllReduce", "2.26.2"), ("collective", "2.24.3")])
@pytest.mark.parametrize("protocol", ["", "SERVER PROTOCOL 2\nOK\n"])
def test_the_text_of_ranks_that_are_behind(operation, version, protocol, tmp_path):
    warnings = (
        f"#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different {operation} operation counts\n"
        "  29 ranks have launched up to operation 6650\n  2 ranks have launched up to operation 6649\n"
        f"  Rank 3 -- {gpu(3, 103)}\n  Rank 5 -- {gpu(5, 105)}\n"
        f"  Rank 7 has not launched any operations -- {gpu(7, 107)}\n\n"
    )
    page = explained(protocol + text(group(0, 1, 32, "MISMATCH"), "", warnings, version), tmp_path)
    (found,) = page.findings
    named = operation if operation == "AllReduce" else "collectives"
    assert found.title == f"rank 7 of communicator 27a079b828ff1a75 of 32 ranks is 6,650 {named} behind"
    assert found.evidence == (
        f"rank 7 has launched 0 {named}, ranks 3, 5 6649, ranks 0, 1, 2, 4, 6, 8, 9, 10 and 21 more 6650"
    )


@pytest.mark.parametrize(
    ("section", "said", "says"),
    [
        ("INCOMPLETE", "Missing communicator data from 1 job process", "did not answer"),
        ("DEAD", "1 job process is considered dead (unreachable via the RAS network)", DEAD),
    ],
)
@pytest.mark.parametrize("line", ["The missing rank: 21", f"Rank 21 -- {gpu(5, 3487984)}"])
def test_the_text_of_a_missing_process(section, said, says, line, tmp_path):
    errors = (
        f"{section}\n  {said}\n  Process 3487984 on node 172.16.64.213 managing GPU 5\n\n"
        f"#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  {line}\n\n"
    )
    warnings = "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n\n"
    page = explained(text(group(0, 1, 32, "INCOMPLETE"), errors, warnings), tmp_path)
    (found,) = page.findings
    assert found.name == "ras_no_answer" and found.ranks == (21,) and "RAS waited in vain" in page.notes[-1]
    assert found.evidence == f"rank 21 {says} (process 3487984 on 172.16.64.213, GPU 5)"
    assert "process 3487984 on 172.16.64.213" in found.fix


def test_the_text_of_errors_and_of_ranks_that_leave(tmp_path):
    errors = (
        "#0-0 (00000000000000aa) ERROR\n  Asynchronous errors on 3 ranks\n  2 ranks reported System error\n"
        f"  Rank 1 -- {gpu(1, 101)}\n  Rank 2 -- {gpu(2, 102)}\n"
        f"  Rank 3 reported Remote process error -- {gpu(3, 103)}\n\n"
    )
    warnings = (
        "#1-0 (00000000000000bb) MISMATCH\n  Communicator ranks have different status\n  3 ranks have status RUNNING\n"
        f"  Rank 2 has status FINALIZE -- {gpu(2, 102)}\n\n"
    )
    failed, state = explained(text(group(0, 1, 8, "ERROR") + group(1, 1, 4), errors, warnings), tmp_path).findings
    assert failed.ranks == (1, 2, 3) and "ranks 1, 2 reported System error (process 101" in failed.evidence
    assert state.evidence == "rank 2 has status FINALIZE, ranks 0, 1, 3 have status RUNNING"


def test_ranks_that_the_text_does_not_name(tmp_path):
    errors = "#0-0 (00000000000000aa) INCOMPLETE\n  Missing communicator data from 40 ranks\n\n"
    page = explained(text(group(0, 1, 64, "INCOMPLETE"), errors), tmp_path)
    assert "40 ranks of communicator 00000000000000aa did not answer" in page.notes[0] and "ncclras -v" in page.notes[0]


# ---- damaged and hostile reports


def test_a_report_that_ends_early(tmp_path):
    whole = report(communicator([rank(0), rank(1)]))
    with pytest.raises(ForeignError, match="cut off or damaged; ask RAS again"):
        explained(whole[:-40], tmp_path)
    page = explained(text(group(0, 1, 4, "MISMATCH")).partition("Warnings")[0], tmp_path)
    assert page.notes[-1].startswith("The report ends before its section Warnings")


def test_mutated_reports_never_crash(tmp_path):
    chance = random.Random(7)
    errors = f"#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  Rank 2 -- {gpu(5, 3)}\n\n"
    warnings = (
        "#0-0 (cf264af53edbe986) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
        f"  3 ranks have launched up to operation 9\n  Rank 1 has launched up to operation 8 -- {gpu(1, 4)}\n\n"
    )
    as_json = report(communicator([rank(0), rank(1, 3, async_error=2)], [missing(2)]), communicator([rank(0)]))
    values = ["-1", "1e400", "999999999999999999999", "null", '"\\u0000<b>"', "[[[[]]]]", "{}", "NaN", "true"]
    path = tmp_path / "report"
    explanations = 0
    for _ in range(100):
        content = bytearray(chance.choice([as_json, text(group(0, 1, 4, "INCOMPLETE"), errors, warnings)]).encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(content))
            match chance.randrange(3):
                case 0:
                    content[at] = chance.randrange(256)
                case 1:
                    del content[at : at + chance.randint(1, 30)]
                case _:
                    digits = next((i for i in range(at, len(content)) if chr(content[i]).isdigit()), at)
                    content[digits : digits + 1] = chance.choice(values).encode()
        path.write_bytes(content)
        try:
            page = opening.explain([path])[0]
            explanations += page.figures["kind"] == "ras"
            assert "\0" not in str(page)
        except ForeignError as error:
            assert str(path) in str(error)
    assert explanations > 30


def test_a_text_of_many_huge_communicators_stays_small(tmp_path):
    about = "#0-0 ({:016x}) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
    about += "  999999999 ranks have launched up to operation 9\n"
    warnings = "".join(about.format(number) for number in range(2_000))
    page = explained(text(group(0, 1, 999_999_999, "MISMATCH"), "", warnings), tmp_path)
    assert len(page.figures["communicators"]) == 2_000
