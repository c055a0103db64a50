"""Prints everything about itself that a training script could notice, as JSON: a warm start must show what a cold one
shows."""

import gc
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader


def handlers() -> dict[str, str]:
    """What becomes of each signal."""
    return {number.name: str(signal.getsignal(number)) for number in signal.Signals}


def descriptors() -> dict[str, str]:
    """What each open descriptor is of, without what differs between two runs."""
    found = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the one that lists them
            found[path.name] = str(path.readlink()).rpartition("/")[2].partition(":")[0]
    return found


def streams() -> list[list[str]]:
    """How the standard streams are set."""
    return [
        [
            one.name,
            one.mode,
            one.encoding,
            one.errors,
            str(one.newlines),
            str(one.line_buffering),
            str(one.write_through),
        ]
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ]


def of_child(queue) -> None:
    queue.put([__name__, random.random()])


def children(method: str) -> str:
    """The module that a child of a start method runs in."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=of_child, args=(queue,))
    child.start()
    name = queue.get(timeout=60)[0]
    child.join()
    return f"{child.name} {name} {child.exitcode}"


def main() -> None:
    """Prints one line."""
    parent = os.getppid()
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    same = {
        "environ": {
            name: value for name, value in os.environ.items() if not name.startswith(("LABKIT_CLOCK", "LABKIT_COLD"))
        },
        "argv": sys.argv,
        "path": sys.path,
        "file": __file__,
        "cwd": str(Path.cwd()),
        "main": [__name__, str(__spec__), sys.modules["__main__"].__dict__ is globals()],
        "flags": str(sys.flags),
        "orig_argv": sys.orig_argv,
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.current_thread().name],
        "signals": handlers(),
        "blocked": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")],
        "descriptors": descriptors(),
        "streams": streams(),
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getpgid(parent) == os.getsid(parent)],
        "start methods": [multiprocessing.get_start_method(), multiprocessing.get_all_start_methods()],
        "children": [children(method) for method in ("fork", "spawn", "forkserver")],
        "workers": [batch.tolist() for batch in DataLoader(torch.arange(4), batch_size=2, num_workers=2)],
        "umask": os.umask(0o22),
        "limits": [
            resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)
        ],
        "name": Path("/proc/self/comm").read_text(),
        "tempdir": tempfile.gettempdir(),
        "logging": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "hooks": [
            str(sys.excepthook),
            str(sys.displayhook),
            sys.gettrace(),
            sys.getprofile(),
            gc.isenabled(),
            gc.get_threshold(),
        ],
        "zone": time.tzname,
        "recursion": sys.getrecursionlimit(),
    }
    own = {
        "chance": [random.random(), numpy.random.rand(), torch.initial_seed()],
        "key": multiprocessing.current_process().authkey.hex(),
    }
    own["stack"] = "".join(traceback.format_stack())
    print(json.dumps({"same": same, "own": own}))


if __name__ == "__main__":
    main()
