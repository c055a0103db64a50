"""The predicted peak against torch's own memory tracker, an independent reference, on the same script."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import SCRIPTS

from labkit.plan.script import write_script
from labkit.prediction.predict import predict
from labkit.runs.handle import settle

TRACKED = SCRIPTS / "tracked.py"


# The tracker does not see what a convolution allocates inside its kernel.
@pytest.mark.parametrize(("workload", "unseen"), [("mlp", 1e-5), ("gpt", 1e-5), ("cnn", 0.06)])
def test_the_predicted_peak_is_that_of_torchs_memory_tracker(workload, unseen, tmp_path):
    spec = settle("single", workload=workload, batch_size=4, samples=64, steps=4, device="cpu")
    script = tmp_path / "train.py"
    script.write_text(write_script(spec, in_place=False))
    tracked = subprocess.run([sys.executable, TRACKED, script], capture_output=True, text=True, check=True)
    predicted = predict(spec).ranks[0].peak_memory_bytes
    assert 0 <= predicted / int(tracked.stdout) - 1 <= unseen
