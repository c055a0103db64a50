"""Runs a script with torchvision's operators known, though none of its libraries loads: `beside_cpu_torch.py script.py
[argument ...]`."""

import runpy
import sys

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor d, Tensor s, float t) -> Tensor")

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
