"""Starts the probe several times, as `python -m labkit.probe ARGUMENTS` would in this folder.

probes.py FOLDER: reads lists of arguments as JSON from standard input. The output of the run with number N is in
FOLDER/N.out and FOLDER/N.err; prints the exit codes as JSON. torch is imported once, and each run is a forked process.
"""

import gc
import json
import os
import sys
from pathlib import Path

from labkit.probe import runner  # imports torch
from labkit.probe.__main__ import start


def run(place: str, arguments: list[str]) -> None:
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}.{kind}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv[:] = [runner.__name__, *arguments]
    sys.path[0] = str(Path.cwd())
    start()


if __name__ == "__main__":
    codes = []
    gc.freeze()  # a run does not collect what is imported
    for number, each in enumerate(json.load(sys.stdin)):
        if os.fork() == 0:
            run(f"{sys.argv[1]}/{number}", each)
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    print(json.dumps(codes))
