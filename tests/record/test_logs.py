"""Logs, read on from where one stopped: bursts, half lines, lines without an end, and search."""

from __future__ import annotations

from labkit.record.files import LogTail, search


def test_a_burst_is_counted_whole_and_held_in_part(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"".join(b"line %d of a burst that nobody can read\n" % number for number in range(200_000)))
    tail = LogTail(path, keep=100)
    while tail.poll():
        assert len(tail.lines) <= 100
    assert (tail.count, tail.dropped) == (200_000, 199_900)
    assert tail.lines[-1] == "line 199999 of a burst that nobody can read"
    assert tail.since(0) == (199_900, list(tail.lines))
    assert tail.since(199_998)[1] == list(tail.lines)[-2:]
    assert tail.since(300_000) == (200_000, [])


def test_one_call_reads_no_more_than_its_budget(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 99_999)
    tail = LogTail(path, keep=10, budget=1_000_000)
    counts = []
    while tail.poll():
        counts.append(tail.count)
    assert counts == [10_000 * call for call in range(1, 11)]
    assert all(line == "y" * 99 for line in tail.lines)


def test_half_lines_broken_bytes_and_progress_bars(tmp_path):
    path = tmp_path / "stdout.log"
    tail = LogTail(lambda: path if path.exists() else None)
    assert not tail.poll()
    word = "é".encode()
    with open(path, "ab", buffering=0) as file:
        file.write(b"whole\nhal" + word[:1])
        assert tail.poll()
        assert (list(tail.lines), tail.count) == (["whole"], 1)
        file.write(word[1:] + b"f\nbroken \xff\xfe bytes\r\n10%\r20%\r")
        tail.poll()
        assert list(tail.lines)[1:] == ["halé" + "f", "broken \ufffd\ufffd bytes"]
        assert tail.partial == "20%"
        file.write(b"100%\nend")
        tail.poll()
        assert (tail.lines[-1], tail.partial, tail.count) == ("100%", "end", 4)
    assert not tail.poll()


def test_a_line_without_end_is_bounded(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"a" * 5_000_000 + b"end")
    tail = LogTail(path)
    while tail.poll():
        assert len(tail.partial) < 20_000
    assert tail.partial.endswith("aend") and tail.count == 0


def test_search_over_a_whole_file(tmp_path):
    path = tmp_path / "stdout.log"
    lines = [b"step %d" % number for number in range(100_000)]
    lines[70_000] += b" LOSS is nan \xff"
    path.write_bytes(b"\n".join(lines))
    assert search(path, "loss IS nan") == [(70_000, "step 70000 LOSS is nan \ufffd")]
    assert search(path, "step 99999") == [(99_999, "step 99999")]
    assert [number for number, _ in search(path, "step 1", limit=3)] == [1, 10, 11]
    assert search(path, "") == search(path, "of no step") == []


def test_a_tail_goes_on_in_the_file_of_the_next_attempt(tmp_path):
    files = [tmp_path / f"attempt_{number}" / "0" / "stdout.log" for number in range(2)]
    files[0].parent.mkdir(parents=True)
    files[0].write_text("one\ncut", encoding="utf-8")
    tail = LogTail(lambda: max(path for path in files if path.exists()))
    assert tail.poll()
    files[1].parent.mkdir(parents=True)
    files[1].write_text("two\n", encoding="utf-8")
    assert tail.poll()
    assert list(tail.lines) == ["one", "cut", "──── attempt 1 ────", "two"]
    assert tail.count == 4
    assert not tail.poll()
