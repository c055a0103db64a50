"""The course of a recorded run, and that a replay shows at any moment what the live view showed then."""

from __future__ import annotations

import pytest
from fabricate import FakeRun

from labkit.analysis.diagnose import findings
from labkit.analysis.moments import course
from labkit.figures.machine import film
from labkit.record.follow import Follower, Recording


@pytest.fixture
def run(runs):
    run = FakeRun(runs)
    run.start()
    yield run
    run.close()


def seen(state) -> tuple:
    """What a front end draws of a state."""
    picture = film(state)
    steps = {number: len(rank.steps) for number, rank in state.ranks.items()}
    owners = {number: rank.owners for number, rank in state.ranks.items()}
    names = [finding.name for finding in findings(state)]
    return state.words, state.step, steps, state.loss_at(), owners, names, picture.shapes, picture.frames


def test_a_replay_shows_what_the_live_view_showed(run):
    """Also after going back."""
    follower = Follower(run.folder)
    live = {}
    for number in range(4):
        run.step(5)
        for writer in run.writers:
            writer.write("memory", t=run.newest, owners={"parameters": 5 << 20, "activations": number << 20})
        follower.poll()
        live[run.newest] = seen(follower.state)
    run.status("finished", started=run.began, ended=run.newest + 1)
    recording = Recording(run.folder)
    for now in [*sorted(live), *sorted(live, reverse=True)]:
        recording.seek(now - recording.began)
        assert seen(recording.state) == live[now]


def test_the_course_of_a_run(run):
    run.step(10)
    run.measured = lambda rank: FakeRun.measured(run, rank) | {"memory": {"peak": 1 << 30}}
    run.step(1)
    del run.measured
    run.step(9)
    run.status("finished", started=run.began, ended=run.began + 3)
    found = course(run.folder)
    assert found.seconds == pytest.approx(3.0)
    assert found.steps.tolist() == pytest.approx([1 + 0.05 * step for step in range(1, 21)])
    assert [(moment.kind, moment.what, round(moment.position, 3)) for moment in found.moments] == [
        ("start", "first step", 1.05),
        ("memory", "peak of memory, 1.0 GiB", 1.55),
        ("end", "finished", 3.0),
    ]
    assert found.step_at(1.0) == 0 and found.step_at(found.end_of(7)) == 7
    assert found.end_of(0) == 0.0 and found.end_of(99) == found.end_of(20)


def test_a_step_is_over_when_a_replay_shows_it(run):
    """It may be written after an event with a later time, such as the measurements of the step before it."""
    for number in range(1, 11):
        run.step()
        for writer in run.writers:
            writer.write("memory", t=run.newest + (0.02 * number), owners={"parameters": 1})
    run.status("finished", started=run.began, ended=run.began + 3)
    found, recording = course(run.folder), Recording(run.folder)
    for number in (3, 1, 10, 9):
        recording.seek(found.end_of(number))
        assert recording.state.step == number


def test_the_first_finding_is_where_it_could_be_seen(run):
    run.step(10)
    for writer in run.writers:
        writer.write("step", t=run.newest + 0.05, step=11, loss=float("nan"), samples=128)
    run.newest += 0.05
    run.step(9)
    run.status("finished", started=run.began, ended=run.began + 10)
    found = course(run.folder)
    moment = next(moment for moment in found.moments if moment.kind == "finding")
    assert moment.position == pytest.approx(found.end_of(11), abs=10 / 1000)
    recording = Recording(run.folder)
    recording.seek(moment.position)
    assert findings(recording.state)
    recording.seek(found.end_of(10))
    assert not findings(recording.state)


def test_a_run_that_ended_before_a_step(run):
    run.status("failed", started=run.began, ended=run.began + 2, message="no ranks")
    found = course(run.folder)
    assert (len(found.steps), found.step_at(1.0), found.end_of(5)) == (0, 0, 0.0)
    assert found.moments[-1].kind == "end"
