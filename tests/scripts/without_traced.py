"""Traces a script of FSDP2 several times, each time as if torch had renamed one private name.

without_traced.py ROW …: ROW is a row of `prediction/tracing/torch_private.py`. Prints ROW and `traced`, or the error.
torch is imported once, and each trace is a forked process.
"""

import importlib
import os
import sys

PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.profiler")


def attempt(row: str) -> str:
    from labkit.plan.spec import Spec
    from labkit.prediction.tracer import _generated, _on_one_device
    from labkit.prediction.tracing import torch_private
    from labkit.probe.torch_private import MissingName

    private = getattr(torch_private, row)
    object.__setattr__(private, "name", f"{private.name}_renamed")
    spec = Spec("fsdp2", workload="mlp", nproc=2, batch_size=4, device="cpu", precision="fp32")
    try:
        from labkit.prediction.tracing.rank import trace

        torch_private.check()
        request = _generated(spec) | {"ranks": 2, "of": [0], "model": _on_one_device(spec)}
        return "traced" if trace(request, 0)["step"]["peak"] else ""
    except MissingName as error:
        return str(error)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    for each in sys.argv[1:]:
        if os.fork() == 0:
            print(each, attempt(each), flush=True)
            os._exit(0)
        os.wait()
