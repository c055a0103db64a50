"""Tests of this folder run in the CUDA environment, on the stand-in; elsewhere there are none."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "CUDA_STAND_IN_GPU" in os.environ else ["test_*.py"]
