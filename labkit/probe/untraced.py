"""Keeps torch.compile from tracing or compiling any part of the probe.

Compiled code reaches the probe in two ways. While Dynamo *traces* a function, it also traces the hooks that the
function calls. Each hook begins with `if compiling(): return`, which Dynamo evaluates while tracing, so that the hook
leaves nothing in the graph. Between two graphs, hooks are really called, and Dynamo would compile every Python frame
below them: `skip_frames` excludes the frames of the probe from compilation, and `untraced` disables Dynamo for
everything that they call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from labkit.probe.torch_private import ACTION, SET_EVAL_FRAME, SET_STRATEGY, SKIP_CODE, STRATEGY

T = TypeVar("T")

compiling = torch.compiler.is_compiling
_set_eval_frame = SET_EVAL_FRAME.get() if SET_EVAL_FRAME.exists() else lambda callback: None


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Calls a function with Dynamo disabled."""
    callback = _set_eval_frame(None)
    try:
        return function(*args)
    finally:
        _set_eval_frame(callback)


def skip_frames() -> None:
    """Excludes all loaded functions of labkit from compilation. Raises `MissingName` if only a part of that is
    possible.
    """
    skip = _skipper()
    for name, module in list(sys.modules.items()):
        if name == "labkit" or name.startswith("labkit."):
            for code in _codes(vars(module).values(), name, set()):
                skip(code)
    SET_EVAL_FRAME.get()


def _skipper() -> Callable[[types.CodeType], Any]:
    """A function that makes Dynamo skip a function's own frame, but not those of its callees."""
    if SKIP_CODE.exists():
        return SKIP_CODE.get()
    set_strategy, action = SET_STRATEGY.get(), ACTION.get()
    strategy = STRATEGY.get()(action.SKIP, action.DEFAULT)
    return lambda code: set_strategy(code, strategy)


def _codes(things: Any, module: str, seen: set[int]) -> Iterator[types.CodeType]:
    for thing in things:
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.CodeType):
            yield thing
            yield from _codes(thing.co_consts, module, seen)
        elif isinstance(thing, types.FunctionType) and thing.__module__ == module:
            yield from _codes([thing.__code__], module, seen)
        elif isinstance(thing, type) and thing.__module__ == module:
            yield from _codes(vars(thing).values(), module, seen)
        elif isinstance(thing, (staticmethod, classmethod)):
            yield from _codes([thing.__func__], module, seen)
        elif isinstance(thing, property):
            yield from _codes([thing.fget], module, seen)
