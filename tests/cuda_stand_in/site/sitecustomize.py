"""Loaded by every Python process on the stand-in: computes the few values on which control flow depends, and starts
coverage.

Kernels compute nothing. Sizes of received objects and positions in them are integers on the device, which torch adds
up and compares, and `torch.equal` decides what was changed: these are computed on the CPU. `any` is false on a device,
since libraries ask it whether a gradient is not finite: ranks that skipped a step, because of what was in their memory,
would wait for different collectives. cuDNN is off, because it asks its kernels which of them are suitable.
"""

import importlib.abc
import importlib.util
import os
import sys

OF_ONE = ("__gt__", "__lt__", "__mul__")  # what Python's `max` and `min` ask, and how a pipeline's stages vote


class AfterTorch(importlib.abc.MetaPathFinder):
    """Changes torch when it has been imported."""

    def find_spec(self, name, path, target=None):
        """Finds torch as Python would, with a loader that changes it."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)  # this may have been a question, and the import comes later
        execute = found.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        found.loader.exec_module = execute_and_change
        return found


def change(torch):
    """Computes sums of integers, sum, product and order of two of which the first is on a device, `equal`, and
    `any`."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)

    def is_whole(value):
        return type(value) is torch.Tensor and value.is_cuda and not (value.is_floating_point() or value.is_complex())

    def sum(tensor, *args, **kwargs):
        if is_whole(tensor):
            return whole_sum(tensor.cpu(), *args, **kwargs).to(tensor.device)
        return whole_sum(tensor, *args, **kwargs)

    def computing(name):
        operation = getattr(torch.Tensor, name)

        def computed(self, other):
            if is_whole(self) and (self.dim() == 0 or (name in OF_ONE and self.numel() == 1)):
                other = other.cpu() if isinstance(other, torch.Tensor) else other
                return operation(self.cpu(), other).to(self.device)
            return operation(self, other)

        return computed

    def equal(first, second):
        return torch_equal(first.cpu(), second.cpu())

    def any(self, *args, **kwargs):
        found = tensor_any(self, *args, **kwargs)
        return found.zero_() if type(self) is torch.Tensor and self.is_cuda else found

    torch_equal, torch.equal = torch.equal, equal
    tensor_any, torch.Tensor.any = torch.Tensor.any, any
    whole_sum, torch.sum = torch.sum, sum
    for name in ("__add__", "__radd__", "__iadd__", *OF_ONE):
        setattr(torch.Tensor, name, computing(name))


if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
if "libcudastandin" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, AfterTorch())
