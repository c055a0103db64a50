"""What one GPU reaches in `products`, `copies` or `kernels`: prints a line of JSON for each figure, with its name, the
unit and five measurements."""

import json
import sys
import time

import torch

SIDE = 8192  # rows and columns of a matrix
LARGE = 1 << 28  # bytes that are copied
REPETITIONS = 5
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def seconds(call, calls: int) -> list[float]:
    """Seconds of one call, several times."""
    call()
    found = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / calls)
    return found


def say(name: str, unit: str, each: list[float]) -> None:
    print(json.dumps({"name": name, "unit": unit, "each": each}), flush=True)


def products() -> None:
    capability = torch.cuda.get_device_capability()
    for name, dtype in PRECISIONS.items():
        if name in ("tf32", "bf16") and capability < (8, 0):
            continue
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        one = torch.randn(SIDE, SIDE, device="cuda").to(dtype)
        taken = seconds(lambda one=one: one @ one, 3)
        say(f"matrix product, {name}", "FLOP/s", [2 * SIDE**3 / each for each in taken])


def copies() -> None:
    count = LARGE // 4
    here, there = torch.zeros(count, device="cuda"), torch.zeros(count, device="cuda")
    say("copy in its memory", "bytes/s", [2 * LARGE / each for each in seconds(lambda: there.copy_(here), 5)])
    for pinned in (True, False):
        host = torch.zeros(count, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        say(
            f"host to GPU, {kind}", "bytes/s", [LARGE / each for each in seconds(lambda h=host: here.copy_(h, True), 2)]
        )
        say(
            f"GPU to host, {kind}", "bytes/s", [LARGE / each for each in seconds(lambda h=host: h.copy_(here, True), 2)]
        )


def kernels() -> None:
    number = torch.zeros(1, device="cuda")
    say("short kernels in a row", "s", seconds(lambda: number.add_(1), 1000))
    say("a short kernel and a synchronisation", "s", seconds(lambda: number.add_(1).item(), 200))


if __name__ == "__main__":
    {"products": products, "copies": copies, "kernels": kernels}[sys.argv[1]]()
