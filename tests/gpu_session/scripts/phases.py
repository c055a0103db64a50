"""Trains on one GPU for some steps. Alone, with the path of a file, it measures its phases with events of its own, and
its kernels with torch's profiler, and writes both there as JSON; under the lab it only trains."""

import itertools
import json
import statistics
import sys

import torch
from torch.autograd.profiler import DeviceType

WARM_UP, STEPS = 5, 30
PROFILED = 5  # steps, one at a time
PHASES = ("forward", "backward", "optimizer")


def train_step(model, optimizer, inputs, targets, mark=lambda: None) -> None:
    mark()
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    mark()
    loss.backward()
    mark()
    optimizer.step()
    mark()
    optimizer.zero_grad()


def phases_of(step) -> dict[str, float]:
    """The median milliseconds of each phase between CUDA events."""
    found = []
    for _ in range(STEPS):
        events = []

        def mark(events=events):
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        step(mark)
        torch.cuda.synchronize()
        found.append([first.elapsed_time(last) for first, last in itertools.pairwise(events)])
    return dict(zip(PHASES, map(statistics.median, zip(*found))))


def spans_of(step) -> list[list[tuple[int, int]]]:
    """By profiled step, the start and the end of each kernel and copy, in nanoseconds."""
    found = []
    for _ in range(PROFILED):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step(lambda: None)
            torch.cuda.synchronize()
        kernels = (
            event.time_range
            for event in profile.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )
        found.append([(round(1000 * span.start), round(1000 * span.end)) for span in kernels])
    return found


def main() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(4096, 4096), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(4096, 4096, device="cuda"), torch.randint(4096, (4096,), device="cuda")

    def step(mark=lambda: None) -> None:
        train_step(model, optimizer, inputs, targets, mark)

    for _ in range(WARM_UP):
        step()
    if len(sys.argv) == 1:
        for _ in range(STEPS):
            step()
        return
    found = {"milliseconds": phases_of(step), "spans": spans_of(step)}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
