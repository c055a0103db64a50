"""Exercises that check a learner's run: each possible mistake gets a specific hint. The run folders are fabricated."""

from __future__ import annotations

import pytest
from answers.failover import recovered
from answers.input_pipeline import Loading, ran
from fabricate import FakeRun

from labkit import Run, check
from labkit.course import answers
from labkit.course.answers import Wrong
from labkit.record.documents import plain


def handed_in(fake, state="finished", **spec):
    """The run of a closed FakeRun."""
    if spec:
        fake.folder.write_json(fake.folder.spec, plain(fake.folder.read_spec()) | spec)
    if state:
        fake.end(state, **({"restarts": 1} if fake.folder.read_spec().max_restarts else {}))
    fake.close()
    return Run.attach(fake.folder.path)


def begun(runs, nproc=2, steps=12, kind=FakeRun, **spec):
    fake = kind(runs, nproc=nproc, steps=60, **spec)
    fake.start()
    fake.step(steps)
    return fake


def test_a_run_in_progress_is_rejected(runs):
    with pytest.raises(Wrong, match="has not ended yet; wait for it"):
        answers.a_run(handed_in(begun(runs), state=None))


def test_a_hang_is_reported_with_its_location(runs):
    fake = begun(runs, hang_after=3)
    for rank, op in enumerate(("barrier", "all_reduce")):
        stack = f'File "broken.py", line {20 + rank}, in <module>'
        ops = [{"op": op, "group": "0", "ranks": [0, 1], "seq": 7, "sizes": [], "over": False}]
        fake.writers[rank].write(
            "waiting", since=fake.began, step=12, phase="other", ops=ops, stack=stack, computed=0.0
        )
    with pytest.raises(
        Wrong, match=r"has not ended: .* waited for .* never reached it .*broken.py:20.* stop it with \.stop\(\)"
    ):
        answers.a_run(handed_in(fake, state=None))


def test_a_failed_run_is_rejected(runs):
    with pytest.raises(Wrong, match="the run failed"):
        answers.finished(handed_in(begun(runs), state="failed"))


def test_a_generated_script_is_rejected(runs):
    with pytest.raises(Wrong, match="this run used the generated ddp script"):
        answers.source(handed_in(begun(runs)))


def test_a_deleted_script_is_an_error(runs):
    run = handed_in(
        begun(runs), script=str(runs / "gone.py"), strategy=None, workload=None, batch_size=None, steps=None
    )
    with pytest.raises(Wrong, match=r"gone\.py cannot be read"):
        answers.source(run)


@pytest.mark.parametrize(
    ("sleeps", "changes", "words"),
    [
        ("pass", {}, "time.sleep in the data set was removed or shortened"),
        ("time.sleep(0.0001)", {}, "time.sleep in the data set was removed or shortened"),
        ("time.sleep(0.0015)", {}, "too much of a step is waiting for data: 1.0 ms, while a batch takes 2 ms"),
        ("time.sleep(0.075)", {"steps": 5}, "at least 8 steps, got 5"),
        ("time.sleep(0.075)", {"nproc": 1}, "the world size must be 2, got 1"),
        ("time.sleep(0.075)", {"kind": FakeRun}, "64 samples per step as before, got 128"),
    ],
)
def test_a_loader_that_was_circumvented_instead_of_fixed(runs, sleeps, changes, words):
    runs.mkdir()
    (runs / "slow_input.py").write_text(sleeps, encoding="utf-8")
    fake = begun(runs, **{"kind": Loading} | changes)
    fake.folder.write_json(
        fake.folder.spec, {"script": str(runs / "slow_input.py"), "nproc": fake.nproc, "device": "cpu"}
    )
    assert words in check("input_pipeline.mend", handed_in(fake)).words


def test_a_fixed_loader_reports_what_it_hides(runs):
    verdict = check("input_pipeline.mend", ran(Loading))
    assert verdict.state == "right" and "75 ms to load" in verdict.words and "waits only 1.0 ms" in verdict.words


def test_a_group_that_resumed_from_the_first_checkpoint(runs):
    assert "the group resumed from step 10, the first checkpoint" in check("failover.comeback", recovered(10)).words


def test_a_group_that_never_restarted(runs):
    assert "never restarted" in check("failover.comeback", handed_in(begun(runs, save_every=10))).words


def test_a_group_that_computes_too_many_steps_twice(runs):
    fake = begun(runs, steps=45, save_every=15, max_restarts=1)
    for rank, writer in enumerate(fake.writers):
        writer.write("start", pid=2000 + rank, host="here", local_rank=rank, world_size=2, device="cpu", attempt=1)
    fake.done = 30
    fake.step(30)
    assert "steps 31 to 45 were computed twice, more than 10" in check("failover.comeback", handed_in(fake)).words


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (lambda write, path: write(path), "was not a complete checkpoint while the new one was being written"),
        (lambda write, path: path.write_text("new"), "write was never called"),
        (
            lambda write, path: write(path.with_name("unfinished")),
            "step.pt must contain the new checkpoint at the end, got nothing",
        ),
    ],
)
def test_an_incomplete_checkpoint(save, words):
    assert words in check("failover.whole", save).words


def test_a_swallowed_failure():
    def quiet(write, path):
        try:
            write(path.with_name("unfinished"))
        except Exception:
            return
        path.with_name("unfinished").replace(path)

    assert "the failure is swallowed" in check("failover.whole", quiet).words


def test_a_temporary_file_in_another_folder(tmp_path):
    def elsewhere(write, path):
        write(tmp_path / "unfinished")
        (tmp_path / "unfinished").replace(path)

    assert "created in another folder" in check("failover.whole", elsewhere).words
