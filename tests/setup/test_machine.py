"""Detection of the machine without CUDA: NVML is faked, so that GPUs can be tested on machines without them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from labkit.setup import machine
from labkit.setup.machine import Gpu, Machine

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED = 12, 9  # as NVML numbers them


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__("Driver Not Loaded" if value == DRIVER_NOT_LOADED else "NVML Shared Library Not Found")
        self.value = value


def fake_nvml(names: list[str], fails: int = 0) -> SimpleNamespace:
    def init() -> None:
        if fails:
            raise NVMLError(fails)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_LIBRARY_NOT_FOUND=LIBRARY_NOT_FOUND,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 99_000,
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
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-11", [1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("0, 1", [0, 1]),
        ("0,0", []),
        ("GPU", []),
    ],
)
def test_cuda_visible_devices_is_interpreted_as_by_cuda(two_t4, monkeypatch, visible, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = Machine.here()
    assert [gpu.index for gpu in here.gpus] == indices
    if not indices:
        assert repr(visible) in here.no_gpu_reason


@pytest.mark.parametrize(
    ("fails", "node", "hardware", "said"),
    [
        (LIBRARY_NOT_FOUND, False, False, "this machine has no GPU"),
        (DRIVER_NOT_LOADED, False, False, "this machine has no GPU"),
        (LIBRARY_NOT_FOUND, False, True, "an NVIDIA GPU, but no driver for it is loaded"),
        (DRIVER_NOT_LOADED, False, True, "(Driver Not Loaded)"),
        (LIBRARY_NOT_FOUND, True, False, "there are GPUs here, without the library NVML"),
        (DRIVER_NOT_LOADED, True, True, "NVML does not answer (Driver Not Loaded)"),
    ],
)
def test_without_nvml_the_reason_says_what_there_is(monkeypatch, tmp_path, fails, node, hardware, said):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], fails))
    monkeypatch.setattr(machine, "_NODES", tmp_path / "nvidia[0-9]*")
    monkeypatch.setattr(machine, "_PCI", tmp_path / "devices")
    if node:
        (tmp_path / "nvidia0").touch()
    for name, vendor, kind in (("0", "0x8086", "0x030000"), ("1", "0x10de", "0x030200" if hardware else "0x040300")):
        device = tmp_path / "devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    here = Machine.here()
    assert here.gpus == () and said in here.no_gpu_reason


def test_a_driver_that_stops_answering_and_a_missing_binding_are_reasons(monkeypatch):
    nvml = fake_nvml(["Tesla T4"])
    nvml.nvmlDeviceGetHandleByIndex = lambda index: (_ for _ in ()).throw(NVMLError(DRIVER_NOT_LOADED))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Machine.here().no_gpu_reason == "the NVIDIA driver does not answer (Driver Not Loaded)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Machine.here().no_gpu_reason == "GPUs cannot be detected, because nvidia-ml-py is not installed"


def test_a_cuda_build_of_torch_without_a_gpu_is_explained():
    assert Machine((), cores=2, memory=1).unused_cuda == ""
    explained = Machine((), cores=2, memory=1, cuda="13.0").unused_cuda
    assert explained == "torch is a build for CUDA 13.0, but this machine has no GPU: CPU ranks over gloo are used"
    assert Machine((Gpu(0, "Tesla T4", 15 << 30, (7, 5)),), cores=2, memory=1, cuda="13.0").unused_cuda == ""


@pytest.mark.parametrize(
    ("line", "version"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda: Optional[str] = None", "")],
)
def test_the_cuda_of_torch_is_read_without_importing_it(monkeypatch, tmp_path, line, version):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: found)
    assert machine._cuda_of_torch() == version
    for damaged in (SimpleNamespace(origin=str(tmp_path / "elsewhere" / "__init__.py")), None):
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name, found=damaged: found)
        assert machine._cuda_of_torch() == ""


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
