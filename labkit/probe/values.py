"""Values that travel between a notebook and ranks that stay: numbers, texts, tensors and arrays, and lists, tuples and
dictionaries of them.

A value is a tree of JSON, and the data of its tensors are bytes beside it. Nothing is unpickled: what arrives can be
data only, from whatever process it comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from labkit.record.channel import LARGEST

DEEPEST = 8  # nested lists
_MOST = 100_000  # items of one list
_KINDS = "biufc"  # of numpy dtypes: booleans and numbers


class NoValue(ValueError):
    """A value that cannot travel; the message says why and begins in the middle of a sentence about its name."""


def packed(value: Any) -> tuple[Any, list[bytes]]:
    """The tree of a value, and the bytes of its tensors. Raises `NoValue`."""
    data: list[bytes] = []
    return _tree(value, data, DEEPEST), data


def unpacked(tree: Any, data: list[bytes]) -> Any:
    """The value of what `packed` returned; tensors are on the CPU. Raises `NoValue`."""
    try:
        return _value(tree, data)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, RuntimeError) as error:
        raise NoValue(f"did not arrive as a value: {error}") from None


def _tree(value: Any, data: list[bytes], depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth == 0:
        raise NoValue(f"nests lists deeper than {DEEPEST} levels")
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _tensor(value, data)
    if type(value) in (list, tuple, dict):
        if len(value) > _MOST:
            raise NoValue(f"has {len(value):,} items, and at most {_MOST:,} can travel; make it a tensor")
        if type(value) is not dict:
            return {type(value).__name__: [_tree(item, data, depth - 1) for item in value]}
        if not all(type(key) in (bool, int, float, str) for key in value):
            raise NoValue("is a dictionary whose keys are not all numbers or strings")
        return {"dict": [[key, _tree(item, data, depth - 1)] for key, item in value.items()]}
    raise NoValue(
        f"is of type {type(value).__name__}; numbers, strings, tensors and arrays can travel, and lists, tuples and"
        " dictionaries of them"
    )


def _tensor(value: Any, data: list[bytes]) -> dict[str, Any]:
    kind = "tensor"
    if not isinstance(value, torch.Tensor):
        kind = "array"
        value = np.asarray(value)
        if value.dtype.kind not in _KINDS:
            raise NoValue(f"is an array of {value.dtype}; arrays of numbers can travel")
        described = {"dtype": value.dtype.newbyteorder("=").str, "shape": list(value.shape)}
        size = value.nbytes
    else:
        if hasattr(value, "to_local"):
            raise NoValue("is a DTensor; take its to_local() or full_tensor()")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise NoValue("is a sparse, quantized or meta tensor; only dense tensors with data can travel")
        described = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        size = value.numel() * value.element_size()
    if size + sum(map(len, data)) > LARGEST:
        raise NoValue(f"has {size:,} bytes, and at most {LARGEST:,} can travel; take a slice")
    if kind == "array":
        data.append(np.ascontiguousarray(value, value.dtype.newbyteorder("=")).tobytes())
    else:
        plain = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        data.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if size else b"")
    return {kind: len(data) - 1, **described}


def _value(tree: Any, data: list[bytes]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        dtype = getattr(torch, tree["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{tree['dtype']} is no dtype")
        content = data[tree["tensor"]]
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(tree["shape"])
    if "array" in tree:
        return np.frombuffer(data[tree["array"]], dtype=np.dtype(tree["dtype"])).reshape(tree["shape"]).copy()
    if "dict" in tree:
        return {key: _value(item, data) for key, item in tree["dict"]}
    kind = {"list": list, "tuple": tuple}[next(iter(tree))]
    return kind(_value(item, data) for item in next(iter(tree.values())))
