"""Imported first: Lightning and transformers import torchvision, which fails if it was built for another torch.

Such a build lacks its compiled operators. Declaring the two that its import refers to makes the rest of the package
usable.
"""

import torch

try:
    import torchvision
except RuntimeError:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
