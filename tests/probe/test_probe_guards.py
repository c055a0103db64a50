"""What the probe must never do: fail the script, follow the wrong thread, keep what it frees, or report it as stuck."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from folded import events_in
from probed import Told

from labkit.probe import hooks
from labkit.probe.clocks import CpuClock
from labkit.probe.journal import Guard, Journal
from labkit.probe.patches import Patches
from labkit.probe.runner import write_error_file
from labkit.probe.steps import StepWatch
from labkit.probe.threads import Position, ScriptThread, WaitWatch


def test_a_batch_on_its_way_to_the_gpu_is_copied_between_phases_only(tmp_path, monkeypatch, request):
    class Watch:
        between, told, thread = True, (), ScriptThread()

        def enter(self, phase):
            self.told = (*self.told, phase)
            return 0

        def leave(self, depth):
            self.told = (*self.told, "over")

    journal, watch = Journal(tmp_path, 0), Watch()
    patches = Patches(journal)
    request.addfinalizer(patches.remove)
    hooks._watch_copies(patches, watch, Guard(journal, "steps"))
    assert torch.ones(2).to("meta").shape == (2,) and watch.told == ()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert torch.ones(2).to("meta").shape == (2,) and watch.told == ("copy", "over")
    watch.between = False
    assert torch.ones(2).to("meta").is_meta and watch.told == ("copy", "over")


def test_a_part_that_fails_is_told_once_and_stays_off(tmp_path):
    guard = Guard(Journal(tmp_path, 0), "steps")

    def fails() -> None:
        raise RuntimeError("a hook's own fault")

    assert guard(fails) is None and guard(fails) is None and guard(lambda: 1) is None
    (event,) = Told(tmp_path).of("probe_error")
    assert (event["part"], event["message"]) == ("steps", "a hook's own fault")


def test_a_thread_with_the_ident_of_one_that_ended_is_not_the_one_that_is_followed():
    """The system reuses thread idents; whether the script's next thread gets one depends on the load."""

    def in_a_thread(look, followed):
        found = []
        thread = threading.Thread(target=lambda: found.append(look(followed)))
        thread.start()
        thread.join()
        return thread.ident, found[0]

    for _ in range(1000):
        thread = ScriptThread()
        assert thread.here()
        first, moved = in_a_thread(lambda followed: (followed.takes_over(), followed.here()), thread)
        second, here = in_a_thread(ScriptThread.here, thread)
        third, looks = in_a_thread(
            lambda followed: (followed.may_move, followed.cpu_seconds(), followed.frame()), thread
        )
        assert moved == (True, True) and not thread.here()
        assert not here and looks[:2] == (True, None)
        assert looks[2].f_code.co_name != "<lambda>", (
            "the main thread's frame, not that of a new thread with the same ident"
        )
        if first == second == third:
            return
    pytest.skip("this system did not give the ident out again")


GARBAGE_WITH_A_LOCAL = """
import gc, threading
from labkit.record.stacks import frame_of

class Cycle:
    def __init__(self):
        self.cycle, self.local = self, threading.local()
        self.local.value = 1

def look():
    assert frame_of(threading.main_thread()).f_code.co_name == "frame_of"

for _ in range(100):
    gc.disable()
    gc.set_threshold(1)
    Cycle()
    spare = [{} for _ in range(90)]
    del spare  # the next dictionaries need no memory, so that the first collection is that for the frame
    gc.enable()
    look()
    assert gc.isenabled()
"""


def test_the_frame_of_a_thread_is_read_without_collecting_garbage():
    """Python 3.11 would block for ever with the GIL held: python/cpython#106883."""
    subprocess.run([sys.executable, "-c", GARBAGE_WITH_A_LOCAL], check=True, timeout=60)


def test_a_forked_child_is_silent(tmp_path):
    journal = Journal(tmp_path, 0)
    child = os.fork()
    if child == 0:
        journal.write("step", step=1)
        os._exit(0 if journal.silent else 1)
    assert os.waitpid(child, 0)[1] == 0
    journal.write("end")
    assert [event["kind"] for event in Told(tmp_path).events] == ["end"]


@pytest.mark.parametrize(("number", "silent"), [(errno.ENOSPC, False), (errno.EIO, True)])
def test_a_disk_that_is_full_or_broken_disturbs_the_journal_and_nothing_else(number, silent, tmp_path, monkeypatch):
    journal = Journal(tmp_path, 0)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    journal.write("step", step=1)
    assert journal.silent is silent


def test_an_optimizer_that_raised_does_not_shift_the_phases(tmp_path):
    watch = StepWatch(Journal(tmp_path, 0))
    watch.use(CpuClock())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(2):
        watch.optimizer_begins(optimizer)  # raises, and the script retries
    watch.optimizer_ends(optimizer)
    watch.leave(watch.data_begins())
    watch.optimizer_begins(optimizer)
    watch.optimizer_ends(optimizer)
    steps = Told(tmp_path).of("step")
    assert (
        [step["step"] for step in steps] == [1, 2]
        and steps[1]["seconds"]["data"] > 0
        and steps[1]["seconds"]["other"] > 0
    )


def test_a_rank_that_compiles_an_extension_does_not_hang_before_a_quarter_of_an_hour(tmp_path):
    for builds, idle, waits in ((False, 40, True), (True, 40, False), (True, 1000, True)):
        journal = Journal(tmp_path / f"{builds}-{idle}", 0)
        watch = StepWatch(journal)
        if builds:
            watch.build_begins("my_operator")
        watch.progress = time.monotonic() - idle
        WaitWatch(journal, watch, 30)._look()
        kinds = [event["kind"] for event in events_in(tmp_path / f"{builds}-{idle}" / "events" / "rank0.jsonl")]
        assert ("waiting" in kinds) == waits


@pytest.mark.parametrize("seconds", [3, 10, 60])
def test_a_rank_waits_after_the_given_seconds_also_before_its_first_step(tmp_path, seconds):
    for idle, kinds in ((seconds - 2, []), (seconds - 0.9, ["called"]), (seconds, ["called", "waiting"])):
        run = tmp_path / str(idle)
        (run / "stacks").mkdir(parents=True)
        watch = StepWatch(journal := Journal(run, 0))
        waits = WaitWatch(journal, watch, seconds)
        watch.progress = waits._progress = time.monotonic() - idle
        waits._look()
        assert [event["kind"] for event in events_in(run / "events" / "rank0.jsonl")] == kinds


def test_no_frame_is_held_while_the_memory_of_a_step_is_profiled(tmp_path):
    """A stored frame would keep the tensors of a returned function, and free them unseen by the profiler."""
    journal, frames = Journal(tmp_path, 0), []
    watch = StepWatch(journal)
    watch.sampler = types.SimpleNamespace(profiles_memory=False)
    waiting = WaitWatch(journal, watch, 30, types.SimpleNamespace(note=lambda frame, limit: frames.append(frame)))

    def noted() -> bool:
        waiting._note()
        return frames.pop() is not None

    assert noted()
    watch.sampler.profiles_memory = True
    assert not noted()
    watch.progress = time.monotonic() - 31
    assert noted(), "a function that is stuck does not return"


def test_a_rank_without_a_frame_is_alive_where_it_was_last(tmp_path, monkeypatch):
    for name in ("enable", "disable", "dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, getattr(faulthandler, name))  # so that monkeypatch restores them
    position = Position(tmp_path, 0)
    try:
        position.note(sys._getframe(), 30)
        first = json.loads((tmp_path / "stacks" / "rank0.position.json").read_text())
        position.note(None, 30)
        second = json.loads((tmp_path / "stacks" / "rank0.position.json").read_text())
    finally:
        position.end()
    assert "test_a_rank_without_a_frame" in first["stack"] == second["stack"]
    assert second["t"] > first["t"]


def test_torchrun_never_reads_half_an_error_file(tmp_path, monkeypatch):
    """It terminates ranks that are still writing theirs when another one has failed."""
    file, seen = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    dump = json.dump

    def written_in_part(data, opened):
        dump(data, opened)
        opened.flush()
        seen.append(file.exists())

    monkeypatch.setattr(json, "dump", written_in_part)
    write_error_file(str(file), ValueError("sample 11 has no label"))
    assert seen == [False] and list(tmp_path.iterdir()) == [file]
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: sample 11 has no label"
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(file)
