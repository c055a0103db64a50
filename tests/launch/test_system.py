"""Samples of GPUs from outside the ranks."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from labkit.launch.watch import Gpus
from labkit.setup.machine import Gpu, Machine


class NVMLError(Exception):
    pass


def test_mig_devices_are_sampled_by_their_uuid_and_one_that_is_gone_has_no_values(monkeypatch):
    def by_uuid(uuid):
        if uuid != "MIG-a":
            raise NVMLError("Not Found")
        return uuid

    def utilisation(handle):
        raise NVMLError("Not Supported")  # as NVML answers for a MIG device

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=len(handle), total=10),
        nvmlDeviceGetUtilizationRates=utilisation,
        nvmlDeviceGetPowerUsage=lambda handle: 70_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus = tuple(Gpu(index, "H100", 10, (9, 0), uuid) for index, uuid in ((3, "GPU-3"), (-1, "MIG-a"), (-1, "MIG-b")))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine(gpus, cores=1, memory=1)))
    whole, mig, gone = Gpus().sample()
    assert (whole["index"], whole["memory_used"], whole["power"]) == (0, 5, 70.0)
    assert (mig["index"], mig["memory_used"], mig["memory_total"], mig["utilisation"]) == (1, 5, 10, None)
    assert gone == {"index": 2, "memory_used": None, "memory_total": None, "utilisation": None, "power": None}
