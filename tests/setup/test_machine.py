"""Detection of the machine without CUDA: NVML is faked, so that GPUs can be tested on machines without them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from labkit.setup.machine import Gpu, Machine


class NVMLError(Exception):
    pass


def fake_nvml(names: list[str], works: bool = True) -> SimpleNamespace:
    def init() -> None:
        if not works:
            raise NVMLError("driver not loaded")

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: names[index],
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}{index}{index}",
        nvmlDeviceGetCudaComputeCapability=lambda index: (7, 5),
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=15 << 30),
    )


@pytest.fixture
def two_t4(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["Tesla T4", "Tesla T4"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_come_with_memory_and_capability(two_t4):
    here = Machine.here()
    assert here.gpus == (Gpu(0, "Tesla T4", 15 << 30, (7, 5)), Gpu(1, "Tesla T4", 15 << 30, (7, 5)))
    assert here.default_nproc("cuda") == 2
    assert here.cores >= 1
    assert here.memory > 1 << 28


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("1", [1]), ("1,0", [1, 0]), ("GPU-11", [1]), ("0,7,1", [0]), ("", []), ("-1", []), ("0, 1", [0, 1])],
)
def test_cuda_visible_devices_is_interpreted_as_by_cuda(two_t4, monkeypatch, visible, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = Machine.here()
    assert [gpu.index for gpu in here.gpus] == indices
    if not indices:
        assert repr(visible) in here.no_gpu_reason


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], works=False))
    here = Machine.here()
    assert here.gpus == ()
    assert here.no_gpu_reason == "this machine has no GPU"


def test_names_as_bytes_are_read_too(monkeypatch):
    nvml = fake_nvml(["x"])
    nvml.nvmlDeviceGetName = lambda index: b"Tesla P100"
    nvml.nvmlDeviceGetUUID = lambda index: b"GPU-0"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Machine.here().gpus[0].name == "Tesla P100"


def test_cpu_ranks_are_two_by_default_and_bounded():
    assert Machine((), cores=2, memory=1).default_nproc("cpu") == 2
    assert Machine((), cores=2, memory=1).max_cpu_ranks == 8
    assert Machine((), cores=32, memory=1).max_cpu_ranks == 64
