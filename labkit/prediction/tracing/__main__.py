"""Reads requests, one JSON object per line, from standard input until it is closed, or has been silent for `_IDLE`
seconds; traces the ranks of each, or measures what they compute, every one in a separate process, and prints the
results.

Each line of the output is an object, {"rank", "result"}, {"rank", "error", "where"} or, for a script of the user's own,
{"rank", "reason"}, or null after the last of a request. A line `null` of the input cancels the request under way: its
processes are killed, and null follows at once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from io import FileIO
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from labkit.prediction.tracing import own_script, torch_private
from labkit.prediction.tracing import rank as generated
from labkit.prediction.tracing.kernels import KNOWN
from labkit.probe.lifetime import end_with_parent, identity

_IDLE = 300.0
_WORK: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "trace": generated.trace,
    "script's trace": own_script.trace,
    "measurement": generated.compute,
}
_TRACES = ("trace", "script's trace")


def results(request: dict[str, Any], lines: FileIO) -> Iterator[dict[str, Any]]:
    """The results, or the errors that ended them, as many at a time as there are cores; the next line ends them."""
    context = multiprocessing.get_context("fork")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running = [*request["of"]], {}
    while waiting or running:
        while waiting and len(running) < cores:
            ours, theirs = context.Pipe(duplex=False)
            rank = waiting.pop(0)
            process = context.Process(target=_work, args=(request, rank, theirs, identity(os.getpid())))
            process.start()
            theirs.close()
            running[ours] = rank, process
        for ours in wait([*running, lines]):
            if ours is lines:
                lines.readline()
                for _, process in running.values():
                    process.kill()
                    process.join()
                return
            rank, process = running.pop(ours)
            try:
                found = ours.recv()
                KNOWN.update(found.get("result", {}).pop("temporaries", {}) if request["work"] in _TRACES else {})
                yield found
            except EOFError:
                process.join()
                yield {"rank": rank, "error": f"exit code {process.exitcode}, without a result", "where": ""}
            process.join()


def _work(request: dict[str, Any], rank: int, connection: Connection, parent: str) -> None:
    end_with_parent(parent)
    warnings.simplefilter("ignore")
    try:
        torch_private.check()
        result = {"rank": rank, "result": _WORK[request["work"]](request, rank)}
    except own_script.Untraceable as error:
        result = {"rank": rank, "reason": str(error)}
    except Exception as error:
        where = _where(error, request.get("path", ""))
        result = {"rank": rank, "error": f"{type(error).__name__}: {error}", "where": where}
        traceback.print_exc()
    connection.send(result)
    sys.stderr.flush()
    os._exit(0)  # whatever threads and exit handlers a script has


def _where(error: BaseException, path: str) -> str:
    """The innermost line of the script in a traceback."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1].lineno}" if lines else ""


def main() -> None:
    """Answers requests. What the scripts print goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # what is imported needs no collection in the processes that trace
    lines = FileIO(sys.stdin.fileno(), closefd=False)  # which buffers nothing that `wait` would then not see
    while select.select([lines], [], [], _IDLE)[0] and (line := lines.readline()):
        if request := json.loads(line):  # else a cancellation came too late
            for result in chain(results(request, lines), [None]):
                print(json.dumps(result), file=output, flush=True)


if __name__ == "__main__":
    main()
