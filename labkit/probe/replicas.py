"""Replicas in threads of the script's process, as in `nn.DataParallel`: the time of each forward, and of waiting for
the GIL.

A replica is identified by the device of its inputs, or on the CPU by its thread (in the order of the threads' names).
Its forward is measured in wall-clock time and CPU time of its thread; on CUDA both end when its kernels are queued,
which is what the GIL delays. A forward without gradients is evaluation and is ignored, as are autograd's own threads.
`memory` is the memory allocated on the GPU; on the CPU it is only the bytes of parameters, inputs and outputs. The wait
for the GIL is measured by a thread that sleeps 5 ms at a time: the delay until Python runs it again, as a fraction of
the total time. It includes the wait for a core, so it is larger if there are fewer cores than busy threads, or other
processes use them. It also includes the timer's own delay of about 0.1 ms.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from labkit.probe.journal import Journal
from labkit.probe.steps import StepWatch
from labkit.probe.threads import is_foreign

_NAP = 0.005  # seconds that the sampler sleeps


class ReplicaWatch:
    """Receives forwards outside of the script's thread; writes one `replica` event per step with such forwards, fewer
    in a long run.
    """

    def __init__(self, journal: Journal, watch: StepWatch):
        self._journal, self._watch = journal, watch
        self._found: dict[str, dict[str, Any]] = {}
        self._thread = threading.local()
        self._sampler: GilSampler | None = None

    def forward_begins(self) -> None:
        """A module's forward begins in another thread, possibly nested in another module's forward."""
        here = self._thread
        here.depth = getattr(here, "depth", 0) + 1
        if here.depth == 1:
            here.began = time.perf_counter(), time.thread_time()

    def forget(self) -> None:
        """Discards the measurements: the thread is the script's training thread, not a replica."""
        self._found = {}

    def forward_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> bool:
        """A forward has ended; returns whether it was a replica's, which is the outermost one."""
        here, ended = self._thread, (time.perf_counter(), time.thread_time())
        here.depth -= 1
        if here.depth or not torch.is_grad_enabled() or is_foreign():
            return False
        if threading.current_thread().name in self._watch.thread.others:
            return False  # it trains for itself
        tensor = next(value for value in inputs if isinstance(value, torch.Tensor))
        on_gpu = tensor.device.type == "cuda"
        new = {"device": str(tensor.device), "forward": 0.0, "cpu": 0.0, "samples": 0, "outputs": 0}
        one = self._found.setdefault(f"{tensor.device.index:03}" if on_gpu else threading.current_thread().name, new)
        one["forward"] += ended[0] - here.began[0]
        one["cpu"] += ended[1] - here.began[1]
        one["samples"] += len(tensor)
        one["outputs"] += output.nbytes if isinstance(output, torch.Tensor) else 0
        if on_gpu:
            one["memory"] = torch.cuda.memory_allocated(tensor.device)
        else:
            one["memory"] = sum(parameter.nbytes for parameter in module.parameters()) + tensor.nbytes + one["outputs"]
        return True

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over: writes the figures of its replicas, and the extra work of replica 0."""
        if not self._found:
            return
        found, self._found = self._found, {}
        replicas = [{"replica": number} | found[name] for number, name in enumerate(sorted(found))]
        gradients = [p.grad.nbytes for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        others = replicas[1:]
        extra = {"outputs": sum(one.pop("outputs") for one in replicas), "gradients": sum(gradients) * len(others)}
        waited = self._sampler.share() if self._sampler else None
        if self._watch.finished % self._journal.spaced(1) == 0:
            self._journal.write("replica", step=self._watch.finished, replicas=replicas, extra=extra, gil_wait=waited)
        if self._sampler is None:
            self._sampler = GilSampler()


class GilSampler:
    """A thread that sleeps and measures how late Python runs it again."""

    def __init__(self) -> None:
        self._late = self._all = 0.0
        threading.Thread(target=self._run, name="labkit GIL sampler", daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(_NAP)
            spent = time.perf_counter() - began
            self._late += max(0.0, spent - _NAP)
            self._all += spent

    def share(self) -> float | None:
        """The delay as a fraction of the time since the last call; None if the thread has not run since."""
        late, spent = self._late, self._all
        self._late = self._all = 0.0
        return late / spent if spent else None
