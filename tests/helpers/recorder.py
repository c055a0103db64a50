"""Runs a written-out script unmodified, and writes down what its steps and evaluations gave: one JSON file per rank.

torchrun … recorder.py SCRIPT FOLDER
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def recorded(function, into: list):
    def call(*args):
        result = function(*args)
        into.append(result.item() if hasattr(result, "item") else result)
        return result

    return call


def main(script: str, folder: str) -> None:
    spec = importlib.util.spec_from_file_location("script", script)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    losses, evaluations = [], []
    program.train_step = recorded(program.train_step, losses)
    program.evaluate = recorded(program.evaluate, evaluations)
    program.main()
    found = {"losses": losses, "evaluations": evaluations}
    Path(folder, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Leave at once: a thread of gloo that lets go of its last tensor while Python is being taken down aborts the
    # process. It shows where a group outlives `destroy_process_group`, as FSDP2's device mesh makes it.
    sys.stdout.flush()
    os._exit(0)
