"""For every Python process under the double: no cuDNN (its engines need kernels that compute), and coverage if asked."""

import os, sys

if os.environ.get("COVERAGE_PROCESS_START"):
    import coverage

    coverage.process_startup()
if "libcudastandin" in os.environ.get("LD_PRELOAD", ""):
    import importlib.abc, importlib.util

    class _Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec("torch")
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                module.backends.cudnn.enabled = False
                whole = module.sum  # sums of integers are sizes (recv_object_list), so they are computed

                def sum(tensor, *args, **kwargs):
                    if (
                        type(tensor) is module.Tensor
                        and tensor.is_cuda
                        and tensor.dtype in (module.int64, module.int32, module.bool)
                    ):
                        return whole(tensor.cpu(), *args, **kwargs).to(tensor.device)
                    return whole(tensor, *args, **kwargs)

                module.sum = sum

                def whole_numbers(name):  # positions in received objects
                    add = getattr(module.Tensor, name)

                    def call(self, other):
                        if (
                            type(self) is module.Tensor
                            and self.is_cuda
                            and self.dim() == 0
                            and not self.is_floating_point()
                        ):
                            other = other.cpu() if isinstance(other, module.Tensor) else other
                            return add(self.cpu(), other).to(self.device)
                        return add(self, other)

                    setattr(module.Tensor, name, call)

                for name in ("__add__", "__radd__", "__iadd__"):
                    whole_numbers(name)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _Hook())
