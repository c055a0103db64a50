"""A class: what is read of learners in folders and zips, also hostile ones; hidden names; and reading again."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import time
import zipfile

import pytest
from classes import LAB, a_class, hand_in, run_of, tried
from commands import called
from places import TESTS

from labkit import classroom
from labkit.course.classroom import learners, page
from labkit.course.classroom.overview import CLOSE, Class, graded, group_of, section_of
from labkit.jobs import zipped

NAMES = ("Adalind", "Quill", "bob", "Marlowe", "cleo", "Dora", "Finch", "emil", "autumn", "homework")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return a_class(tmp_path, monkeypatch)


def rows_of(folder, **settings):
    return {row.learner: row for row in Class(folder, **settings).read().rows}


def test_learners_are_read_from_folders_homes_and_zips(folder):
    rows = rows_of(folder)
    assert set(rows) == {"Adalind Quill", "bob", "cleo", "Dora Finch_42_file", "emil"}
    ada = rows["Adalind Quill"]
    assert (ada.passed, ada.attempts, ada.begun, ada.run, ada.state) == (2, 7, 2, "DDP · cnn · 2 ranks", "finished")
    assert time.time() - 300 < ada.active <= time.time() and not ada.trouble
    assert rows["bob"].state == "failed" and rows["bob"].passed == 0
    assert rows["cleo"].passed == 1 and rows["Dora Finch_42_file"].state == "finished"
    assert rows["emil"].run == "" and rows["emil"].begun == 1


def test_a_lab_is_done_when_all_of_its_exercises_are(tmp_path):
    names = [name for name, (lab, _) in learners.known_exercises().items() if lab == LAB]
    tried(tmp_path / "class" / "ada", **{name.replace(".", "__"): (1, True) for name in names})
    assert rows_of(tmp_path / "class")["ada"].done == 1


def test_what_most_got_wrong_comes_first_with_lab_and_section(folder):
    found = Class(folder).read()
    wrong = [(entry.wrong, entry.what) for entry in found.asked]
    assert wrong == sorted(wrong, key=lambda pair: -pair[0]) and wrong[0][0] == 3
    guess = next(entry for entry in found.asked if entry.what.startswith("guess: step time"))
    assert (guess.right, guess.tried, guess.lab) == (1, 4, LAB)
    sampler = learners.known_exercises()["ddp.sampler"][1]
    asked = next(entry for entry in found.asked if entry.what == sampler)
    assert (asked.right, asked.tried, asked.attempts, asked.section) == (0, 2, 2.5, "Exercises")
    assert section_of(LAB, "guess", "overlapped_percent") == ("Buckets",)


def test_guesses_are_grouped_by_how_far_they_are_from_the_measured_value(folder):
    (group,) = [group for group in Class(folder).read().guesses if group.what.startswith("step time")]
    assert [len(names) for names in group.groups] == [1, 0, 0, 1, 0, 2, 0]
    assert group.groups[CLOSE] == ("Adalind Quill: 51 ms (+2 %)",) and group.measured == "50 ms"
    assert group.groups[0] == ("bob: 10 ms (−80 %)",)


@pytest.mark.parametrize(
    ("error", "points", "group"),
    [
        (-0.8, False, 0),
        (-0.1, False, CLOSE),
        (0.1, False, CLOSE),
        (0.11, False, 4),
        (3.5, False, 6),
        (None, False, 6),
        (-0.2, True, 2),
        (0.6, True, 6),
    ],
)
def test_an_error_of_ten_percent_is_close(error, points, group):
    assert group_of(error, points) == group


def test_only_the_first_guess_of_a_learner_counts(tmp_path):
    runs = tmp_path / "class" / "ada"
    for value in (10.0, 50.0):
        run_of(runs, guess={"step_ms": value})
    (group,) = Class(tmp_path / "class").read().guesses
    assert group.count == 1 and "10 ms" in group.groups[0][0]


# ---- hands up


def test_a_run_that_has_just_failed_is_a_hand_until_a_later_one_ends_well(tmp_path):
    runs, now = tmp_path / "class" / "ada", time.time()
    run_of(runs, "failed", now - 300, "CUDA out of memory. Tried to allocate 2.00 GiB")
    run_of(runs, "failed", now - 60, "CUDA out of memory. Tried to allocate 4.00 GiB")
    found = Class(tmp_path / "class")
    (hand,) = found.refresh().hands
    assert hand.failed == 2 and abs(hand.when - (now - 60)) < 1 and "memory" in hand.title and hand.fix
    assert not Class(tmp_path / "class", minutes=0.5).read().hands
    run_of(runs)
    assert not found.refresh().hands


def test_hands_are_in_the_order_of_their_failures(tmp_path):
    for name, ago in (("ada", 200), ("bob", 20), ("cleo", 100)):
        run_of(tmp_path / "class" / name, "failed", time.time() - ago, "ValueError: x")
    assert [hand.learner for hand in Class(tmp_path / "class").read().hands] == ["bob", "cleo", "ada"]


def test_a_clock_that_is_ahead_is_said_and_moves_nothing_into_the_future(tmp_path):
    run_of(tmp_path / "class" / "ada", "failed", time.time() + 7200, "ValueError: x")
    found = Class(tmp_path / "class").read()
    assert found.rows[0].active <= time.time()
    assert found.hands[0].when <= time.time(), "the time of the file counts"


# ---- names


def test_hidden_names_appear_nowhere(folder, tmp_path, capsys):
    (folder / "Finch.zip").write_bytes(b"PK no zip of Finch")
    grades = folder.with_name("autumn-grades.csv")
    grades.write_text("name,exercise,verdict\nbob/homework.py,build_data_parallel.naive,right\n")
    found = Class(folder, hide_names=True).read()
    html = tmp_path / "page.html"
    assert called("class", str(folder), "--hide-names", "--html", str(html)) == 0
    texts = [page.fragment(found), json.dumps(found.to_json()), html.read_text(encoding="utf-8")]
    for more in ([], ["--json"]):
        capsys.readouterr()
        assert called("class", str(folder), "--hide-names", *more) == 0
        texts.append(capsys.readouterr().out)
    for text in (*texts, page.title(found)):
        assert not [name for name in NAMES if name.lower() in text.lower()]
    for text in texts:
        assert "learner " in text and "first failure" in text, "the lab's own name of the finding"
    named = page.fragment(Class(folder).read())
    assert {name for name in NAMES if name in named} >= {"Adalind", "bob", "Marlowe", "cleo"}, (
        "otherwise they are shown"
    )


def test_numbers_in_place_of_names_stay_the_same(folder, monkeypatch):
    key = b"with which no two of these learners would have the same number"
    monkeypatch.setattr("labkit.course.classroom.overview._key", lambda: key)
    found = Class(folder, hide_names=True)
    before = {row.learner: row.attempts for row in found.read().rows}
    tried(folder / "Aaron" / "runs", ddp__steps=(9, False))
    assert before.items() <= {row.learner: row.attempts for row in found.refresh().rows}.items()
    assert before.items() <= {row.learner: row.attempts for row in Class(folder, hide_names=True).read().rows}.items()


def test_names_with_html_and_escapes_are_shown_as_text(tmp_path, capsys):
    name = "<img src=x onerror=alert(1)>\x1b[31m\u202e"
    run_of(tmp_path / "class" / name, "failed", error="</div><script>alert(1)</script>\x1b]0;x\x07")
    html = page.fragment(Class(tmp_path / "class").read())
    assert "<img" not in html and "<script" not in html and "\x1b" not in html and "\u202e" not in html
    assert called("class", str(tmp_path / "class")) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and r"\x1b[31m" in out


# ---- damaged and hostile learners


def test_a_damaged_learner_is_one_row_that_says_so(folder, tmp_path):
    (folder / "broken.zip").write_bytes(b"PK\x03\x04 nothing")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(tmp_path / "cleo")
    (folder / "link.zip").symlink_to(folder / "cleo.zip")
    os.mkfifo(folder / "pipe.zip")
    (folder / "other.zip").write_bytes(zipped({"essay.txt": b"x"}))
    rows = rows_of(folder)
    assert "damaged" in rows["broken"].trouble and "nothing of the lab" in rows["empty"].trouble
    assert "link" in rows["link"].trouble and "no runs folder" in rows["other"].trouble and rows["pipe"].trouble
    assert rows["Adalind Quill"].passed == 2 and not rows["Adalind Quill"].trouble


def test_a_folder_that_the_teacher_may_not_read_says_what_to_do(folder, monkeypatch):
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, *how: path != folder / "bob" and may(path, *how))
    assert "labkit progress --zip" in rows_of(folder)["bob"].trouble


@pytest.mark.parametrize(
    "text", ["[]", '{"ddp.steps": 3}', "{", '{"ddp.steps": {"tries": -1, "done": true}}', "[" * 10_000]
)
def test_a_damaged_record_of_exercises_leaves_the_runs(tmp_path, text):
    run_of(tmp_path / "class" / "ada")
    (tmp_path / "class" / "ada" / "exercises.json").write_text(text)
    (row,) = Class(tmp_path / "class").read().rows
    assert row.trouble == "exercises.json is damaged" and row.state == "finished"


def test_runs_with_links_huge_files_and_wrong_types_are_counted(tmp_path, monkeypatch):
    runs = tmp_path / "class" / "ada"
    good = run_of(runs)
    for number in range(4):
        good.copy(runs / f"20300101-00000{number}-bad")
    (runs / "20300101-000000-bad" / "status.json").write_text('{"state": "great"}')
    (runs / "20300101-000001-bad" / "status.json").write_bytes(b" " * (2 << 20))
    (runs / "20300101-000002-bad" / "status.json").unlink()
    (runs / "20300101-000002-bad" / "status.json").symlink_to(good.status)
    shutil.rmtree(runs / "20300101-000003-bad")
    (runs / "20300101-000003-bad").symlink_to(good.path)
    (row,) = Class(tmp_path / "class").read().rows
    assert row.trouble.startswith("3 runs cannot be read") and row.run


def test_a_zip_bomb_and_a_large_zip_are_bounded(tmp_path, monkeypatch):
    place = tmp_path / "class"
    place.mkdir()
    with zipfile.ZipFile(place / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("exercises.json", b" " * (100 << 20))
        archive.writestr("../../escape/status.json", "{}")
    (row,) = Class(place).read().rows
    assert row.trouble == "exercises.json is larger than 1.0 MiB" and not row.attempts
    assert sorted(path.name for path in place.iterdir()) == ["bomb.zip"] and not (tmp_path / "escape").exists()
    monkeypatch.setattr(learners, "_MOST_ZIP", 100)
    (row,) = Class(place).read().rows
    assert "larger than 100 B" in row.trouble


def test_a_zip_with_any_damage_is_one_row(tmp_path, monkeypatch):
    runs, place = tmp_path / "mine", tmp_path / "class"
    place.mkdir()
    run_of(runs)
    tried(runs, ddp__steps=(2, True))
    hand_in(runs, place / "ada.zip", monkeypatch)
    whole, chance = (place / "ada.zip").read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (place / "ada.zip").write_bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        learner = learners.Learner(place, "ada.zip")
        learner.refresh()
        found = learner.record
        assert learner.complete and (found.damaged or found.notes or found.runs or found.exercises)


def read_again(place):
    found = [learners.Learner(place, path.name) for path in sorted(place.iterdir())]
    for learner in found:
        learner.refresh()
    return found


def test_what_is_uploaded_is_checked_and_replaces_only_zips_of_the_lab(tmp_path, monkeypatch):
    place, runs = tmp_path / "class", tmp_path / "runs"
    place.mkdir()
    tried(runs, ddp__steps=(1, True))
    hand_in(runs, tmp_path / "ada.zip", monkeypatch)
    first = (tmp_path / "ada.zip").read_bytes()
    tried(runs, ddp__steps=(5, True))
    hand_in(runs, tmp_path / "ada.zip", monkeypatch)
    good = (tmp_path / "ada.zip").read_bytes()
    (tmp_path / "theirs.zip").write_bytes(first)
    (place / "link.zip").symlink_to(tmp_path / "theirs.zip")
    (place / "thesis.zip").write_bytes(b"mine")
    (place / "folder.zip").mkdir()
    found = Class(place)
    assert found.take_in([("ada.zip", first), ("ada.zip", good), ("Zoë Ünal.ZIP", first)]) == (3, [])
    assert {row.learner: row.attempts for row in found.read().rows if not row.trouble} == {"ada": 5, "Zoë Ünal": 1}
    assert stat.S_IMODE((place / "ada.zip").stat().st_mode) == 0o600
    names = (
        "../out.zip",
        "/tmp/x.zip",
        "a\\b.zip",
        ".hidden.zip",
        "_x.zip",
        "a\0.zip",
        "a\n.zip",
        "ada",
        "a" * 200 + ".zip",
    )
    added, refused = found.take_in([(name, good) for name in (*names, "link.zip", "thesis.zip", "folder.zip")])
    assert added == 0 and len(refused) == len(names) + 3 and "was not written by labkit" in refused[-2]
    added, refused = found.take_in(
        [("b.zip", b"PK nothing"), ("c.zip", b"0" * (17 << 20)), ("d.zip", zipped({"x": b""}))]
    )
    assert (added, [why.split(": ")[0] for why in refused]) == (0, ["b.zip", "c.zip", "d.zip"])
    assert (tmp_path / "theirs.zip").read_bytes() == first and (place / "thesis.zip").read_bytes() == b"mine"
    assert sorted(path.name for path in place.iterdir()) == [
        "Zoë Ünal.ZIP",
        "ada.zip",
        "folder.zip",
        "link.zip",
        "thesis.zip",
    ]
    found.hide_names = True
    assert found.take_in([("Quill", b"")]) == (0, ["a file: its name is not that of a learner with .zip after it"])


def test_a_zip_of_a_whole_runs_folder_is_read_like_the_small_one(tmp_path, monkeypatch):
    runs, place = tmp_path / "runs of ada", tmp_path / "class"
    place.mkdir()
    run_of(runs, guess={"step_ms": 60.0})
    tried(runs, ddp__steps=(2, True))
    shutil.make_archive(str(place / "whole"), "zip", tmp_path, runs.name)
    hand_in(runs, place / "small.zip", monkeypatch)
    small, whole = Class(place).read().rows
    assert (
        (small.passed, small.run, small.state)
        == (whole.passed, whole.run, whole.state)
        == (1, "DDP · cnn · 2 ranks", "finished")
    )
    checked = (runs / "exercises.json").stat().st_mtime
    (runs / "exercises.json").unlink()
    assert all(abs(learner.record.answered - checked) < 3 for learner in read_again(place))
    names = zipfile.ZipFile(place / "small.zip").namelist()
    assert not [name for name in names if name.endswith((".py", ".log", ".jsonl", ".steps", "launch.json"))]


def test_runs_of_an_earlier_version_are_read(tmp_path):
    shutil.copytree(TESTS / "recorded", tmp_path / "class" / "ada")
    (row,) = Class(tmp_path / "class").read().rows
    assert row.run.endswith("2 ranks") and not row.trouble


# ---- reading again


def test_only_what_has_changed_is_read_again(folder, monkeypatch):
    found, read = Class(folder), []
    found.read()
    whole = learners.read_below
    monkeypatch.setattr(learners, "read_below", lambda root, path, most: read.append(path) or whole(root, path, most))
    monkeypatch.setattr(learners, "InZip", lambda path: pytest.fail(f"{path} was read again"))
    found.refresh()
    assert not read
    run = run_of(folder / "Adalind Quill")
    tried(folder / "emil" / "runs", start__steps=(2, True))
    after = {row.learner: row for row in found.refresh().rows}
    assert after["emil"].passed == 1
    assert {path.parent.name for path in read} == {run.name, "runs"}


def test_a_run_under_way_is_read_until_it_has_ended(tmp_path):
    runs = tmp_path / "class" / "ada"
    run = run_of(runs)
    summary = run.summary.read_bytes()
    run.summary.unlink()
    run.status.write_text(json.dumps({"state": "starting", "started": time.time()}))
    found = Class(tmp_path / "class")
    assert found.refresh().rows[0].state in ("starting", "lost")
    run.summary.write_bytes(summary)
    run.status.write_text(json.dumps({"state": "failed", "started": time.time(), "ended": time.time()}))
    after = found.refresh()
    assert after.rows[0].state == "failed" and after.hands


def test_thousands_of_runs_are_read_in_portions_newest_first(tmp_path, monkeypatch):
    runs = tmp_path / "class" / "ada"
    good = run_of(runs)
    for number in range(30):
        shutil.copytree(good.path, runs / f"20300101-{number:06}-more")
    monkeypatch.setattr(learners, "RUNS", 20)
    monkeypatch.setattr(learners, "_RUNS_AT_ONCE", 8)
    found = Class(tmp_path / "class")
    assert "still being read" in found.refresh().notes[0] and not found.complete
    for _ in range(2):
        last = found.refresh()
    assert found.complete and not last.notes and "newest 20" in last.rows[0].trouble


def test_learners_come_and_go(folder):
    found = Class(folder)
    found.read()
    shutil.rmtree(folder / "bob")
    tried(folder / "zoe", ddp__steps=(1, True))
    assert {"zoe"} <= {row.learner for row in found.refresh().rows} and "bob" not in page.fragment(found.refresh())
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="is gone"):
        found.refresh()


# ---- grades, the panel outside of a notebook, and the commands


def test_the_panel_is_text_outside_of_a_notebook(folder):
    text = repr(classroom(folder))
    assert text.startswith("Class of autumn: 5 learners\n") and "Adalind Quill" in text
    assert "Adalind" not in repr(classroom(folder, hide_names=True))
    with pytest.raises(ValueError, match="is not a folder"):
        classroom(folder / "nothing")
    with pytest.raises(ValueError, match="every must be"):
        classroom(folder, every=0)


def test_grades_are_those_of_labkit_grade_or_else_the_own_record(folder):
    assert rows_of(folder)["Adalind Quill"].grade.endswith(" own")
    rows = "Adalind Quill/lab13.ipynb,build_data_parallel.naive,right\nbob.py,build_data_parallel.zero1,wrong\n"
    folder.with_name("autumn-grades.csv").write_text(f"name,exercise,verdict\n{rows}")
    after = rows_of(folder)
    assert after["Adalind Quill"].grade.startswith("1/") and after["bob"].grade.startswith("0/")
    assert after["cleo"].grade == ""
    with pytest.raises(ValueError, match="other columns"):
        graded("a,b\n1,2\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "is not a folder"),
        ((".", "--minutes", "0"), "--minutes"),
        ((".", "--grades", "no.csv"), "grades"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called("class", *arguments) == 2
    assert says in capsys.readouterr().err


def test_a_zip_goes_into_a_folder_by_the_name_of_the_user_and_nothing_else_is_overwritten(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "mine"))
    monkeypatch.setenv("JUPYTERHUB_USER", "../ada")
    tried(tmp_path / "mine", ddp__steps=(1, True))
    (tmp_path / "class").mkdir()
    for _ in range(2):
        assert called("progress", "--zip", str(tmp_path / "class")) == 0
    assert [row.passed for row in Class(tmp_path / "class").read().rows] == [1]
    (tmp_path / "thesis.zip").write_bytes(b"mine")
    assert called("progress", "--zip", str(tmp_path / "thesis.zip")) == 1
    assert (tmp_path / "thesis.zip").read_bytes() == b"mine" and "was not written by labkit" in capsys.readouterr().err
    assert called("progress", "--follow") == 2
