"""Answers to the exercises of lab 09. The run folders are fabricated, so that no verdict depends on the machine's
speed."""

import math
import os
from pathlib import Path

from answers.loaders import DEALT, loader_of
from fabricate import FakeRun

from labkit import Run
from labkit.course.build.solutions.input_pipeline import Loader


class Loading(FakeRun):
    """A run of a learner's script that waits for data for this fraction of a step."""

    data_fraction = 0.02

    def measured(self, rank):
        step = super().measured(rank)
        return step | {"samples": 64, "seconds": step["seconds"] | {"data": self.data_fraction * self.step_seconds}}


class Waiting(Loading):
    """The same, with a loader that does not keep up."""

    data_fraction = 0.6


def ran(kind):
    root = Path(os.environ["LABKIT_RUNS"])
    root.mkdir(exist_ok=True)
    script = root / "slow_input.py"
    script.write_text("time.sleep(0.0750)", encoding="utf-8")
    fake = kind(root)
    fake.folder.write_json(fake.folder.spec, {"script": str(script), "nproc": 2, "device": "cpu"})
    fake.start()
    fake.step(12)
    fake.end()
    fake.close()
    return Run.attach(fake.folder.path)


RIGHT = {
    "workers": lambda load, compute: math.ceil(load / compute),
    "mend": lambda: ran(Loading),
    "loader": lambda: Loader,
}
WRONG = {
    "workers": (lambda load, compute: round(load / compute), "a batch is ready every 125 ms"),
    "mend": (lambda: ran(Waiting), "still: rank 0 spends 60% of each step waiting for data"),
    "loader": (lambda: loader_of(DEALT), "would wait for rank"),
}
