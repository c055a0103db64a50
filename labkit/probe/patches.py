"""All wrappers and hooks of the probe: a table of what is replaced in torch, and in Python to find new processes,
and one class that installs and removes them.

A function is replaced by a wrapper, once per process and part of the probe. Each replacement is guarded on its own: if
torch or Python has no such name, its part of the probe is lost, and everything else is installed. Public hooks are used
if torch has one; the functions that are wrapped instead have none, or theirs runs for every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from labkit.probe import torch_private
from labkit.probe.journal import Guard, Journal
from labkit.probe.torch_private import MissingName, find

_MODULES, _OPTIMIZERS = "torch.nn.modules.module", "torch.optim.optimizer"
_DISTRIBUTED, _GROUPS = "torch.distributed", "torch.distributed.distributed_c10d"
_PROFILER, _BATON = "torch.autograd.profiler", "torch.utils.file_baton.FileBaton"

# by part of the probe: the functions that are wrapped or that register a hook, and which other modules export them
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "steps": {
        f"{_MODULES}.register_module_forward_pre_hook": (),
        f"{_MODULES}.register_module_forward_hook": (),
        f"{_OPTIMIZERS}.register_optimizer_step_pre_hook": (),
        f"{_OPTIMIZERS}.register_optimizer_step_post_hook": (),
        "torch.autograd.backward": (),
        "torch.autograd.grad": (),
    },
    "halves of backward": {f"{_DISTRIBUTED}.pipelining.PipelineStage.backward_maybe_with_nosync": ()},
    "data loading": {"torch.utils.data.DataLoader.__iter__": (), torch_private.NEXT_BATCH.name: ()},
    "copies to the GPU": {"torch.Tensor.to": (), "torch.Tensor.cuda": ()},
    "optimizers": {"torch.optim.Optimizer.__init__": ()},
    "scaled losses": {"torch.amp.GradScaler.__init__": ()},
    "looks": {
        f"{_MODULES}.register_module_module_registration_hook": (),
        "torch.nn.utils.clip_grad_norm_": ("torch.nn.utils.clip_grad.clip_grad_norm_",),
        "torch.nn.utils.clip_grad_value_": ("torch.nn.utils.clip_grad.clip_grad_value_",),
    },
    "metrics": {"torch.monitor.register_event_handler": ()},
    "builds": {f"{_BATON}.try_acquire": (), f"{_BATON}.wait": (), f"{_BATON}.release": ()},
    "timelines": {f"{_PROFILER}.profile.__init__": ()},
    "open records": {f"{_PROFILER}.record_function.__enter__": (), f"{_PROFILER}.record_function.__exit__": ()},
    "data loaders": {
        "torch.utils.data.DataLoader.__iter__": (),
        "torch.utils.data.DistributedSampler.__iter__": (),
        "torch.utils.data.BatchSampler.__iter__": (),
    },
    "calls of item": {"torch.Tensor.item": ()},
    "restored states": {"torch.optim.Optimizer.load_state_dict": (), "torch.nn.Module.load_state_dict": ()},
    "saved files": {"torch.save": ("torch.serialization.save",)},
    "startup": {
        f"{_DISTRIBUTED}.init_process_group": (
            f"{_GROUPS}.init_process_group",
            f"{_DISTRIBUTED}.device_mesh.init_process_group",
        ),
        "torch.utils.data.DataLoader.__init__": (),
    },
    "process groups": {f"{_DISTRIBUTED}.destroy_process_group": (f"{_GROUPS}.destroy_process_group",)},
    # P2POp compares with the functions of distributed_c10d
    "sends": {f"{_DISTRIBUTED}.{name}": (f"{_GROUPS}.{name}",) for name in ("send", "isend", "recv", "irecv")},
    "tensors": {f"{_OPTIMIZERS}.register_optimizer_step_pre_hook": ()},
    "stores": {f"{_DISTRIBUTED}.rendezvous.TCPStore": ()},
    "processes": {"multiprocessing.process.BaseProcess.start": (), "subprocess.Popen.__init__": ()},
}
_PART = "labkit_part"  # attribute of a wrapper


class Patches:
    """Installs wrappers and hooks, and removes them again."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._undo: list[Callable[[], Any]] = []

    def wrap(self, part: str, name: str, make: Callable[[Any], Callable[..., Any]]) -> bool:
        """Replaces the function `name` of the table by `make(function)`; returns whether it is wrapped now."""
        return bool(Guard(self._journal, part)(self._wrap, part, name, make))

    def wrap_method(self, part: str, kind: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replaces a method of a class that is not known before the script imports it."""
        Guard(self._journal, part)(self._replace, part, kind, name, make)

    def hook(self, part: str, name: str, function: Callable[..., Any], undo: str = "", **options: Any) -> None:
        """Calls the function `name` of the table, which registers `function` as a hook; `undo` is the name of the
        function that removes it (default: `remove` of the handle).
        """
        Guard(self._journal, part)(self._hook, part, name, function, undo, options)

    def remove(self) -> None:
        """Removes all hooks and wrappers, except wrappers that something else has wrapped since."""
        while self._undo:
            self._undo.pop()()

    def _hook(self, part: str, name: str, function: Callable[..., Any], undo: str, options: dict[str, Any]) -> None:
        assert name in TARGETS[part]
        handle = find(name, part)(function, **options)
        self._undo.append(functools.partial(find(undo, part), handle) if undo else handle.remove)

    def _wrap(self, part: str, name: str, make: Callable[[Any], Callable[..., Any]]) -> bool:
        elsewhere = TARGETS[part][name]
        original = find(name, part)
        owner, _, attribute = name.rpartition(".")
        wrapper = self._replace(part, find(owner, part), attribute, make)
        for other in elsewhere if wrapper else ():
            place, _, attribute = other.rpartition(".")
            try:
                module = find(place, part)
            except MissingName:
                continue  # this torch does not export it there
            if getattr(module, attribute, None) is original:
                self._set(module, attribute, wrapper)
        return True

    def _replace(self, part: str, owner: Any, attribute: str, make: Callable[[Any], Callable[..., Any]]) -> Any:
        original = getattr(owner, attribute)
        if any(getattr(layer, _PART, None) == part for layer in _layers(original)):
            return None
        copied = () if isinstance(original, type) else functools.WRAPPER_UPDATES
        wrapper = functools.update_wrapper(make(original), original, updated=copied)
        setattr(wrapper, _PART, part)
        self._set(owner, attribute, wrapper)
        return wrapper

    def _set(self, owner: Any, attribute: str, wrapper: Any) -> None:
        before = vars(owner).get(attribute, owner)  # the owner itself if the attribute is inherited
        setattr(owner, attribute, wrapper)

        def undo() -> None:
            if vars(owner).get(attribute) is wrapper:
                if before is owner:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, before)

        self._undo.append(undo)


def _layers(function: Any) -> Iterator[Any]:
    """A function, and the functions that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
