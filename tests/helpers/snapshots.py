"""Snapshots of CUDA memory from a small model of torch's caching allocator, in the layout of torch 2.13: the rules of
`c10/cuda/CUDACachingAllocator.cpp` for sizes, segments, splitting and merging, without streams."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
SITE = "/env/lib/python3.11/site-packages/torch"
USER = "/home/user/train.py"
MALLOC = ("torch::unwind::unwind()", "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**)")
ENGINE = ("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)", "clone3")


def frame(filename: str, line: int, name: str = "main") -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def native(*names: str) -> list[dict[str, Any]]:
    return [frame("??", 0, name) for name in names]


def script(line: int) -> list[dict[str, Any]]:
    """Memory that the script itself allocates."""
    return [*native(*MALLOC), frame(USER, line), frame(USER, 99, "<module>")]


def module(line: int, layer: int = 31, cause: int = 21) -> list[dict[str, Any]]:
    """The forward pass: a module that the user's module calls at `layer`, from `line` of the script."""
    call = frame(f"{SITE}/nn/modules/module.py", 1789, "_call_impl")
    own = [frame("/home/user/model.py", layer, "forward"), call, frame(USER, line), frame(USER, 99, "<module>")]
    return [*native(*MALLOC), frame(f"{SITE}/nn/modules/linear.py", 134 + cause, "forward"), call, *own]


def parameters() -> list[dict[str, Any]]:
    apply = frame(f"{SITE}/nn/modules/module.py", 1369, "_apply")
    return [*native(*MALLOC), apply, frame(f"{SITE}/nn/modules/module.py", 1383, "to"), *script(10)[2:]]


def backward(node: str = "AddmmBackward0") -> list[dict[str, Any]]:
    """The backward pass, in a thread without Python."""
    return native(*MALLOC, f"torch::autograd::generated::{node}::apply(std::vector<at::Tensor>&&)", *ENGINE)


def optimizer(line: int = 24) -> list[dict[str, Any]]:
    return [*native(*MALLOC), frame(f"{SITE}/optim/adam.py", 178, "_init_group"), *script(line)[2:]]


class OutOfMemory(Exception):
    pass


class Allocator:
    """One device of `capacity` bytes. `most_events` is the size of the ring buffer; 0 records no history."""

    def __init__(self, capacity: int = 16 << 30, device: int = 0, most_events: int = 1 << 30):
        self.capacity, self.device, self.most_events = capacity, device, most_events
        self.segments: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.active = self.peak = self.reserved_peak = 0  # requested bytes; reserved bytes
        self._next, self._time = 0x7F00_0000_0000, 1_795_785_000_000_000

    @property
    def reserved(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    def alloc(self, requested: int, frames: Sequence[Any]) -> int:
        """The address of a new block."""
        small = requested <= MIB
        length = max(512, -(-requested // 512) * 512)
        block = self._fitting(length, small) or self._reserve(length, small, requested, frames)
        rest = block["size"] - length
        if rest >= 512 if small else rest > MIB:
            blocks = self._segment_of(block)["blocks"]
            other = _inactive(block["address"] + length, rest)
            blocks.insert(blocks.index(block) + 1, other)
            block["size"] = length
        block.update(requested_size=requested, state="active_allocated", frames=frames)
        self._event("alloc", block["address"], requested, frames)
        self.active += requested
        self.peak = max(self.peak, self.active)
        return block["address"]

    def free(self, address: int, waits: bool = False) -> None:
        """Frees a block; one that `waits` for another stream stays active."""
        (block,) = (block for segment in self.segments for block in segment["blocks"] if block["address"] == address)
        self._event("free_requested", address, block["requested_size"], [])
        block["state"] = "active_pending_free"
        if waits:
            return
        self._event("free_completed", address, block["requested_size"], [])
        self.active -= block["requested_size"]
        blocks = self._segment_of(block)["blocks"]
        block.update(state="inactive", requested_size=0, frames=[])
        at = blocks.index(block)
        for first, second in ((at, at + 1), (at - 1, at)):
            pair = blocks[first : second + 1] if first >= 0 else []
            if [neighbour["state"] for neighbour in pair] == ["inactive", "inactive"]:
                blocks[first]["size"] += blocks.pop(second)["size"]

    def step(self) -> None:
        """An optimizer step begins and ends, as torch's own annotations have it."""
        for stage in ("START", "END"):
            self._time += 10
            name = "Optimizer.step#Adam.step"
            self.steps.append({"stage": stage, "name": name, "device": self.device, "time_us": self._time})

    def snapshot(self) -> dict[str, Any]:
        segments = []
        for segment in self.segments:
            blocks = [dict(block) for block in segment["blocks"]]
            active = [block for block in blocks if block["state"] != "inactive"]
            sizes = {
                "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
                "active_size": sum(block["size"] for block in active),
                "requested_size": sum(block["requested_size"] for block in active),
            }
            segments.append(segment | sizes | {"blocks": blocks})
        return {
            "segments": segments,
            "device_traces": [[]] * self.device + [self.events[-self.most_events :] if self.most_events else []],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": self.steps,
        }

    def _fitting(self, length: int, small: bool) -> dict[str, Any] | None:
        pool = [segment for segment in self.segments if (segment["segment_type"] == "small") == small]
        free = [block for segment in pool for block in segment["blocks"] if block["state"] == "inactive"]
        return min((block for block in free if block["size"] >= length), key=lambda block: block["size"], default=None)

    def _reserve(self, length: int, small: bool, requested: int, frames: Sequence[Any]) -> dict[str, Any]:
        total = 2 * MIB if small else 20 * MIB if length < 10 * MIB else -(-length // (2 * MIB)) * 2 * MIB
        if self.reserved + total > self.capacity:
            for segment in [segment for segment in self.segments if len(segment["blocks"]) == 1]:
                if segment["blocks"][0]["state"] == "inactive":
                    self.segments.remove(segment)
                    self._event("segment_free", segment["address"], segment["total_size"], [])
        if self.reserved + total > self.capacity:
            self._event("oom", self.capacity - self.reserved, requested, frames)
            raise OutOfMemory
        address = self._next
        self._next += total
        self.segments.append(
            {
                "device": self.device,
                "address": address,
                "total_size": total,
                "stream": 0,
                "segment_type": "small" if small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [_inactive(address, total)],
            }
        )
        self._event("segment_alloc", address, total, frames)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return self.segments[-1]["blocks"][0]

    def _segment_of(self, block: dict[str, Any]) -> dict[str, Any]:
        return next(
            segment
            for segment in self.segments
            if segment["address"] <= block["address"] < segment["address"] + segment["total_size"]
        )

    def _event(self, action: str, address: int, length: int, frames: Sequence[Any]) -> None:
        self._time += 7
        entry = {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": length,
            "stream": 0,
            "time_us": self._time,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": frames,
        }
        self.events.append(entry)


def _inactive(address: int, length: int) -> dict[str, Any]:
    return {"address": address, "size": length, "requested_size": 0, "state": "inactive", "frames": []}


def train(
    gpu: Allocator,
    steps: int = 12,
    layers: int = 4,
    *,
    keeps_graph: bool = False,
    extra: Callable[[Allocator, int], None] = lambda gpu, step: None,
) -> None:
    """Trains a model with Adam: 8 MiB for each layer's parameters, and 16 MiB for its activations. `keeps_graph`: the
    losses are stored with their graph, so that no activation is freed. `extra` happens at the end of each step."""
    for _ in range(layers):
        gpu.alloc(8 * MIB, parameters())
    old: int | None = None
    for step in range(steps):
        batch = gpu.alloc(3 * MIB, script(20))
        if old is not None:
            gpu.free(old)
        old = batch
        activations = [gpu.alloc(16 * MIB, module(21, layer=31)) for _ in range(layers)]
        loss = gpu.alloc(4, script(22))
        gradients = []
        for activation in reversed(activations):
            gradients.append(gpu.alloc(8 * MIB, backward()))
            if not keeps_graph:
                gpu.free(activation)
        gpu.step()
        if step == 0:
            for _ in range(2 * layers):
                gpu.alloc(8 * MIB, optimizer())
        temporary = gpu.alloc(8 * MIB, optimizer())
        gpu.free(temporary)
        for gradient in gradients:
            gpu.free(gradient)
        if not keeps_graph:
            gpu.free(loss)
        extra(gpu, step)


def write(path: Path, content: Any) -> Path:
    """As torch writes it, or as JSON if the name says so."""
    if path.suffix == ".json":
        path.write_text(json.dumps(content), encoding="utf-8")
    else:
        path.write_bytes(pickle.dumps(content))
    return path
