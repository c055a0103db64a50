"""Runs answers of the lessons that build a strategy on forked ranks: one process imports torch for all of them.

As a program, it reads lines of JSON {script, nproc, folder, patience, limit} and forks the ranks of each script; the
answer is an empty line. As a module, its fixture replaces the launcher of these exercises.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path

import pytest

from labkit.course.build import criteria

LIMIT = 240.0  # seconds for one answer on a very busy machine, where FSDP took 68
LIMIT_ALONE = 600.0  # seconds for an answer that starts its ranks itself, in several runs
PATIENCE = 8.0  # seconds without a call of torch after which a rank says where it waits


@pytest.fixture(scope="session")
def forks():
    """The process that forks the ranks."""
    process = Forks()
    yield process
    process.end()


@pytest.fixture
def forked_ranks(forks, monkeypatch):
    """Answers run on forked ranks instead of a run of their own, and one examiner draws and judges for all of them."""
    monkeypatch.setattr(criteria, "launch", forks.launch)
    monkeypatch.setattr(criteria, "launch_alone", partial(forks.launch, limit=LIMIT_ALONE))
    monkeypatch.setattr(criteria, "examiner", lambda: nullcontext(forks.examiner))


class Forks:
    """One process that forks the ranks of many scripts; it starts with the first one."""

    @cached_property
    def _process(self) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @cached_property
    def examiner(self) -> criteria.Examiner:
        """The examiner of all answers; it starts with the first one."""
        return criteria.Examiner().__enter__()

    def launch(self, text: str, nproc: int, folder: Path, limit: float = LIMIT) -> None:
        """Runs a script on `nproc` ranks; all of them have ended when it returns, killed after `limit` seconds."""
        script = folder / "train.py"
        script.write_text(text, encoding="utf-8")
        job = {"script": str(script), "nproc": nproc, "folder": str(folder), "patience": PATIENCE, "limit": limit}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline(), "the process that forks the ranks has ended"

    def end(self) -> None:
        """Ends the process, if it was started."""
        if "_process" in vars(self):
            self._process.stdin.close()
            self._process.wait(60)
        if "examiner" in vars(self):
            self.examiner.__exit__()


def _serve() -> None:
    from labkit.course.build.ranks.entry import run_answer

    gc.freeze()  # a collection in a rank does not copy the pages of what is imported
    for line in sys.stdin:
        job = json.loads(line)
        run_answer.__defaults__ = (job["patience"],)
        pids = [_fork(job, rank) for rank in range(job["nproc"])]
        _wait(pids, job["limit"])
        print(flush=True)


def _fork(job: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch.distributed as dist

        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["nproc"])}
        initialise = dist.init_process_group
        store = dist.FileStore(f"{job['folder']}/store", job["nproc"])
        dist.init_process_group = lambda backend: initialise(backend, store=store, rank=rank, world_size=job["nproc"])
        sys.argv = [job["script"], job["folder"]]
        errors = os.open(f"{job['folder']}/stderr{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        text = Path(job["script"]).read_text(encoding="utf-8")
        names = {"__name__": "__main__", "__file__": job["script"]}
        exec(compile(text, job["script"], "exec", dont_inherit=True), names)
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _wait(pids: list[int], limit: float) -> None:
    """As torchrun: when a rank has failed, the others are killed, after a moment in which they can report."""
    end, left = time.monotonic() + limit, set(pids)
    while left:
        for pid in sorted(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if status:
                    end = min(end, time.monotonic() + 0.3)
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    _serve()
