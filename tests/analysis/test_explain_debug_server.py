"""Dumps of torch's debug server: real ones of ranks that hang on gloo, whose servers listen on loopback, and made-up
ones."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator

import pytest
from conftest import wait_until
from places import SCRIPTS

from labkit import run
from labkit.analysis.foreign import ForeignError, opening

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> Iterator[list[str]]:
    """The addresses of the servers of two ranks, of which rank 0 waits in a collective."""
    folder = tmp_path_factory.mktemp("ports")
    job = run(SCRIPTS / "debugged.py", nproc=2, device="cpu", args=(str(folder),))
    try:
        ports = [folder / f"{rank}.port" for rank in (0, 1)]
        wait_until(lambda: all(port.exists() for port in ports), 120)
        yield [f"http://127.0.0.1:{port.read_text()}" for port in ports]
    finally:
        job.stop()


@pytest.fixture
def handlers(workers, monkeypatch) -> types.ModuleType:
    """torch's own handlers, which write the dumps, asking these servers."""
    try:
        import tabulate  # noqa: F401
    except ImportError:  # only the tables of the flight recorder need it
        monkeypatch.setitem(sys.modules, "tabulate", types.SimpleNamespace(tabulate=str))
    from torch.distributed.debug import _debug_handlers, _frontend

    def fetch(endpoint: str, args: str = "", *, timeout: float):
        urls = [f"{worker}/handler/{endpoint}?{args}" for worker in workers]
        return urls, _frontend.fetch_thread_pool(urls, timeout=timeout)

    monkeypatch.setattr(_debug_handlers, "fetch_all", fetch)
    return _debug_handlers


def test_stacks_say_which_rank_is_in_no_collective(handlers, tmp_path):
    wait_until(lambda: "in all_reduce" in handlers.StacksHandler().dump(), 60)
    for second in (17, 27):
        (tmp_path / f"stacks_20261127_2143{second}.txt").write_text(handlers.StacksHandler().dump())
    (page,) = opening.explain([tmp_path])
    (found,) = page.findings
    assert page.title == "2 dumps of torch's debug server · 2 ranks · 21:43:27"
    assert found.name == "outside_of_collective" and found.ranks == (1, 0) and found.kind == "wrong"
    assert (
        found.title.startswith("rank 0 is in all_reduce (debugged.py:") and "; rank 1 is at debugged.py:" in found.title
    )
    assert found.evidence == "the stacks of rank 0 are the same in the last 2 dumps, since 21:43:17"


def test_wait_counters_are_read(handlers, tmp_path):
    (tmp_path / "wait_counters_20261127_214317.txt").write_text(handlers.WaitCountersHandler().dump())
    (page,) = opening.explain([tmp_path])
    assert {"0", "1"} == page.figures["counters"].keys() and not page.findings
    assert page.figures["counters"]["0"]["pytorch.wait_counter.TCPStore__init"]["active_count"] == 0
    assert page.notes == [
        "No wait counter is active: they count waits for the store and for compilation, not those in collectives."
    ]


def test_the_flight_recorder_of_gloo_is_one_that_is_explained(handlers, tmp_path):
    _, answers = handlers.fetch_all("fr_trace_json", timeout=60)
    for rank, answer in enumerate(answers):
        (tmp_path / f"fr_{rank}.json").write_text(answer.text)
    (page,) = opening.explain([tmp_path])
    assert page.findings[0].title.startswith("rank 1 never called all_reduce #2")


# ---- made-up dumps


def stack(*frames: str) -> str:
    lines = "\n".join(f"  File {frame}" for frame in frames)
    return f"Current thread 0x00007f (most recent call first):\n  <no Python frame>\n\nThread 0x00007e:\n{lines}\n"


WAITS = stack(f'"{C10D}", line 9 in all_reduce', '"/home/ann/train.py", line 88 in step')
AWAY = stack('"/home/ann/data.py", line 7 in load', '"/home/ann/train.py", line 80 in <module>')


def dump(*sections: str, before: str = "") -> str:
    heads = (f"=== Rank {rank}: http://n:1/handler/dump_traceback? ===\n" for rank in range(len(sections)))
    return before + "\n".join(head + section for head, section in zip(heads, sections))


def test_a_rank_without_an_answer(tmp_path):
    before = "PARTIAL DATA: 2/3 workers responded\n  Rank 2: Timeout: read timed out\n\n"
    (tmp_path / "stacks.txt").write_text(dump(WAITS, WAITS, "Error: 408", before=before))
    (page,) = opening.explain([tmp_path])
    (found,) = page.findings
    assert found.name == "no_stack" and found.ranks == (2,) and found.evidence == "rank 2: Error: 408"


def test_one_dump_does_not_prove_a_hang(tmp_path):
    (tmp_path / "stacks.txt").write_text(dump(WAITS, AWAY, WAITS))
    (found,) = opening.explain([tmp_path])[0].findings
    assert found.kind == "unseen" and "take a second dump" in found.fix
    assert found.title == "ranks 0, 2 are in all_reduce (train.py:88 in step); rank 1 is at data.py:7 in load"


def test_mutated_dumps_never_crash(tmp_path):
    chance = random.Random(11)
    whole = dump(WAITS, AWAY, '{"pytorch.wait_counter.x": {"active_count": 2, "total_calls": 7}}', "Error: 503")
    path = tmp_path / "stacks_20261127_214317.txt"
    for _ in range(100):
        content = bytearray(whole.encode())
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(content))
            if chance.random() < 0.5:
                content[at] = chance.randrange(256)
            else:
                content[at : at + chance.randint(1, 40)] = chance.choice([b"", b"===", b"[[[[", b"NaN", b"\xf0", b"\0"])
        path.write_bytes(content)
        try:
            assert opening.explain([path])[0].title
        except ForeignError as error:
            assert str(path) in str(error)
