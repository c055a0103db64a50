"""Prints what torch and NVML see of two T4s, and what a few steps of training leave."""

import json

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

first = torch.device("cuda", 0)
torch.cuda.set_device(first)
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 26 * 26, 10)
)
net.to(first)
optimizer = torch.optim.AdamW(net.parameters())


def step():
    images = torch.randn(32, 1, 28, 28).pin_memory().to(first, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(net(images), torch.zeros(32, dtype=torch.long, device=first))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(3):
    step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    step()
    torch.cuda.synchronize()
events = profiler.profiler.kineto_results.events()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
square = torch.ones(64, 64, device=first)
start.record()
for _ in range(20):
    torch.mm(square, square)
end.record()
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
pynvml.nvmlInit()
print(
    json.dumps(
        {
            "devices": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
            "capability": torch.cuda.get_device_capability(),
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "copied": torch.tensor([1.0, 2.0]).to(first).cpu().tolist(),
            "filled": torch.full((2,), 3.0, device=first).tolist(),
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used": total - free,
            "milliseconds": start.elapsed_time(end),
            "nvml": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
            "kernels": sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events),
        }
    )
)
