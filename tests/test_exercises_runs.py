"""Exercises that look at a learner's own run: each thing that can be wrong with it is told by its own words. Runs are written, not run."""

from __future__ import annotations

import pytest
from answers.failover import comes_back
from answers.input_pipeline import Loading, ran
from fabricate import FakeRun

from labkit import Run, check
from labkit.course.exercises import Wrong, own


def handed_in(fake, state="finished", **spec):
    """The run of a FakeRun that is closed."""
    if spec:
        fake.folder.write_json(fake.folder.spec, fake.folder.read_json(fake.folder.spec) | spec)
    if state:
        fake.end(state, **({"restarts": 1} if fake.folder.read_json(fake.folder.spec).get("max_restarts") else {}))
    fake.close()
    return Run.attach(fake.folder.path)


def begun(runs, nproc=2, steps=12, kind=FakeRun, **spec):
    fake = kind(runs, nproc=nproc, steps=60, **spec)
    fake.start()
    fake.step(steps)
    return fake


def test_a_run_that_still_goes_on_is_told_to_be_waited_for(runs):
    with pytest.raises(Wrong, match="has not ended yet; wait for it"):
        own.a_run(handed_in(begun(runs), state=None))


def test_a_run_that_hangs_is_told_where(runs):
    fake = begun(runs, hang_after=3)
    for rank, op in enumerate(("barrier", "all_reduce")):
        stack = f'File "clinic.py", line {20 + rank}, in <module>'
        ops = [{"op": op, "group": "0", "ranks": [0, 1], "seq": 7, "sizes": [], "over": False}]
        fake.writers[rank].write("waiting", since=fake.began, step=12, phase="other", ops=ops, stack=stack, computed=0.0)
    with pytest.raises(Wrong, match=r"has not ended: .* waited for .* never reached it .*clinic.py:20.* end it with \.stop\(\)"):
        own.a_run(handed_in(fake, state=None))


def test_a_run_that_failed_is_told_so(runs):
    with pytest.raises(Wrong, match="the run failed"):
        own.finished(handed_in(begun(runs), state="failed"))


def test_a_script_of_the_lab_is_none_of_ones_own(runs):
    with pytest.raises(Wrong, match="this ran ddp as the lab writes it"):
        own.source(handed_in(begun(runs)))


def test_a_script_that_is_gone(runs):
    run = handed_in(begun(runs), script=str(runs / "gone.py"), strategy=None, workload=None, batch_size=None, steps=None)
    with pytest.raises(Wrong, match=r"gone\.py cannot be read any more"):
        own.source(run)


@pytest.mark.parametrize(
    ("sleeps", "changes", "words"),
    [
        ("pass", {}, "the disk became faster"),
        ("time.sleep(0.0001)", {}, "the disk became faster"),
        ("time.sleep(0.0015)", {}, "too much of a step is waiting for data: 1.0 ms, of 2 ms"),
        ("time.sleep(0.075)", {"steps": 5}, "5 steps are too few"),
        ("time.sleep(0.075)", {"nproc": 1}, "this ran on one rank"),
        ("time.sleep(0.075)", {"kind": FakeRun}, "a rank now takes 128 samples at a step"),
    ],
)
def test_a_loader_that_was_not_mended_but_went_round(runs, sleeps, changes, words):
    runs.mkdir()
    (runs / "slow_input.py").write_text(sleeps, encoding="utf-8")
    fake = begun(runs, **{"kind": Loading} | changes)
    fake.folder.write_json(fake.folder.spec, {"script": str(runs / "slow_input.py"), "nproc": fake.nproc, "device": "cpu"})
    assert words in check("input_pipeline.mend", handed_in(fake)).words


def test_a_mended_loader_says_what_it_hides(runs):
    verdict = check("input_pipeline.mend", ran(Loading))
    assert verdict.state == "right" and "75 ms to fetch" in verdict.words and "waits 1.0 ms" in verdict.words


def test_a_group_that_came_back_from_the_first_checkpoint(runs):
    assert "it went on from step 10, the first checkpoint" in check("failover.comeback", comes_back(10)).words


def test_a_group_that_never_had_to_come_back(runs):
    assert "never had to come back" in check("failover.comeback", handed_in(begun(runs, save_every=10))).words


def test_a_group_that_loses_more_than_was_asked(runs):
    fake = begun(runs, steps=45, save_every=15, max_restarts=1)
    for rank, writer in enumerate(fake.writers):
        writer.write("start", pid=2000 + rank, host="here", local_rank=rank, world_size=2, device="cpu", attempt=1)
    fake.done = 30
    fake.step(30)
    assert "steps 31 to 45 were computed twice, more than 10" in check("failover.comeback", handed_in(fake)).words


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (lambda write, path: write(path), "no whole checkpoint while the new one was being written"),
        (lambda write, path: path.write_text("new"), "write was never called"),
        (lambda write, path: write(path.with_name("unfinished")), "there was nothing under step.pt at the end"),
    ],
)
def test_a_checkpoint_that_is_not_whole(save, words):
    assert words in check("failover.whole", save).words


def test_a_failure_that_nobody_hears_of():
    def quiet(write, path):
        try:
            write(path.with_name("unfinished"))
        except Exception:
            return
        path.with_name("unfinished").replace(path)

    assert "nobody hears of the failure" in check("failover.whole", quiet).words


def test_a_checkpoint_made_in_another_folder(tmp_path):
    def elsewhere(write, path):
        write(tmp_path / "unfinished")
        (tmp_path / "unfinished").replace(path)

    assert "made in another folder" in check("failover.whole", elsewhere).words
