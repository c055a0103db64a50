"""Findings about processes that died without a message, dumps of faulthandler, and memory that ran out."""

from __future__ import annotations

import pytest
from diagnosed import (
    CPU_FULL,
    CUDA_FULL,
    GONE,
    MIB,
    NCCL_FULL,
    error,
    first,
    fold,
    names,
    spec,
    start,
    status,
)

from labkit.launch.watch import out_of_memory_kills
from labkit.record.stacks import of_crash, place
from labkit.record.state import RunState

# ---- processes that died without a message


def died(code: int, **more) -> dict:
    ended = status("failed", rank0=-15, rank1=code)
    ended["status"]["failures"]["1"] |= more
    return ended


STACK = '  File "/home/ann/train.py", line 7, in main\n  File "/home/ann/train.py", line 41, in load'


@pytest.mark.parametrize(
    ("code", "more", "title", "cause"),
    [
        (-11, {"traceback": STACK, "last_seen": False}, "SIGSEGV (train.py:41 in load)", "native code"),
        (
            -9,
            {"traceback": STACK, "last_seen": True},
            "SIGKILL (last seen at train.py:41 in load)",
            "killed from outside",
        ),
        (
            7,
            {"traceback": STACK, "last_seen": True},
            "exit code 7 (last seen at train.py:41 in load)",
            "an exception or exited",
        ),
        (-11, {}, "SIGSEGV", "native code"),
    ],
)
def test_a_process_that_died_is_told_with_its_last_line(code, more, title, cause):
    found = first(fold(spec(), start(0, 1), error(0, GONE), died(code, **more)), "first_failure")
    assert (
        found.title == f"rank 1 failed first: {title}; rank 0 was terminated because rank 1 failed"
        and cause in found.cause
    )


@pytest.mark.parametrize(
    ("kills", "cause"),
    [(0, "by a person or a scheduler"), (None, "or by the kernel because memory ran out (dmesg shows that)")],
)
def test_a_kill_that_was_none_of_the_kernel_or_may_have_been(kills, cause):
    ended = died(-9)
    ended["status"]["oom_kills"] = kills
    assert first(fold(spec(), start(0, 1), ended), "first_failure").cause.endswith(cause)


def test_a_rank_that_the_kernel_killed_for_memory():
    ended = died(-9, traceback=STACK, last_seen=True)
    ended["status"]["oom_kills"] = 1
    sample = {"kind": "system", "t": 9.0, "ranks": {"1": {"cpu_percent": 99.0, "rss": 700 * MIB}}}
    state = fold(spec(), start(0, 1), sample, error(0, GONE), ended)
    found = first(state, "out_of_memory")
    assert found.title == "rank 1 was killed by the kernel because memory ran out, last seen at train.py:41 in load"
    assert (
        "the kernel killed 1 process of this cgroup for lack of memory" in found.evidence
        and "700.0 MiB" in found.evidence
    )
    assert found.ranks == (1, 0)
    assert names(state) == ["out_of_memory"]


# ---- dumps of faulthandler


CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f1a2b7fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/ann/labkit/probe/threads.py", line 41 in run

Current thread 0x00007f1a3c0fe740 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/ann/train.py", line 41 in load
  File "/home/ann/train.py", line 7 in <module>

Extension modules: numpy.core (total: 1)
"""


def test_the_stack_of_a_crash():
    assert place(of_crash(CRASH)) == "train.py:41 in load"
    assert of_crash(CRASH).splitlines()[0] == '  File "/home/ann/train.py", line 7 in <module>'
    held = CRASH.replace("Fatal Python error: Segmentation fault", "Timeout (0:00:30)!").replace(
        "Current thread", "Thread"
    )
    assert place(of_crash(held)) == "train.py:41 in load"  # the main thread is the last
    assert (
        of_crash("")
        == of_crash("Killed")
        == of_crash("Timeout (0:00:30)!\nThread 0x1 (most recent call first):\n  <no Python frame>\n")
        == ""
    )


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"self": "0::/job/7\n", "sys/job/7/memory.events": "low 0\nmax 4\noom 2\noom_kill 2\n"}, 2),
        ({"self": "0::/\n", "sys/memory.events": "oom_kill 1\n"}, 1),  # in a container
        (
            {
                "self": "4:memory:/job\n0::/\n",
                "sys/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            },
            3,
        ),
        ({"self": "4:memory:/docker/9\n", "sys/memory/memory.oom_control": "oom_kill 5\n"}, 5),
        ({"self": "4:cpu,memory:/a:b\n", "sys/memory/a:b/memory.oom_control": "oom_kill 6\n"}, 6),
        ({"self": "4:memory:/job\n", "sys/memory/job/memory.oom_control": "under_oom 0\n"}, None),  # an old kernel
        ({"self": "1:cpu:/\n"}, None),
        ({}, None),
    ],
)
def test_the_kernels_count_of_processes_that_it_killed_for_memory(tmp_path, files, count):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert out_of_memory_kills(tmp_path / "self", tmp_path / "sys") == count


# ---- memory


def test_a_tensor_that_no_device_has_room_for():
    held = {"parameters": 2 * MIB, "activations": MIB, "gradients": 0}
    state = fold(
        spec(),
        start(0, 1),
        error(1, CPU_FULL, at=(139, "disturb"), owners=held),
        error(0, GONE, t=501.0),
        status("failed"),
    )
    found = first(state, "out_of_memory")
    assert found.ranks == (1, 0) and found.title == "rank 1 ran out of memory at train.py:139 in disturb"
    assert "1125899906842624 bytes" in found.evidence and "parameters 2.0 MiB, activations 1.0 MiB" in found.evidence
    assert (
        "gradients" not in found.evidence
        and "an allocation of 1.0 PiB" in found.cause
        and "no setting would have fitted" in found.fix
    )


def test_memory_ran_out_where_torch_cannot_say_so():
    message = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154'
    state = fold(spec(), start(0, 1), error(1, message, at=(139, "disturb")), status("failed"))
    assert first(state, "out_of_memory").title == "rank 1 ran out of memory at train.py:139 in disturb"


def full(held: dict, **asked) -> RunState:
    """Rank 1 asks for 2 GiB on a GPU of 16 GiB."""
    gpu = {"kind": "system", "t": 1.0, "gpus": [{"index": 1, "memory_used": 15 << 30, "memory_total": 16 << 30}]}
    given = {name: int(size * (1 << 30)) for name, size in held.items()}
    failed = error(1, CUDA_FULL, "OutOfMemoryError", owners=given)
    return fold(spec(device="cuda", **asked), start(0), start(1, device="cuda:1"), gpu, failed, status("failed"))


@pytest.mark.parametrize(("scaling", "share"), [("weak", 64), ("strong", 32)])
def test_a_batch_that_would_have_fitted(scaling, share):
    found = first(full({"parameters": 2, "activations": 12}, batch_size=64, scaling=scaling), "out_of_memory")
    fits = int(share * (0.95 * 16 - 2) / (12 + 2))
    assert f"reduce the batch per rank to {fits}," in found.fix and "an allocation of 2.0 GiB" in found.cause
    assert "activations 12.0 GiB, parameters 2.0 GiB" in found.evidence


@pytest.mark.parametrize("held", [{}, {"parameters": 2}])
def test_nothing_is_computed_from_a_breakdown_that_is_not_there(held):
    assert first(full(held), "out_of_memory").fix.startswith("use a smaller --batch-size")


def test_no_batch_fits_where_the_rest_fills_the_device():
    found = first(full({"parameters": 5.1, "optimizer": 10.2, "activations": 0.1}), "out_of_memory")
    assert "15.3 GiB of 16.0 GiB" in found.fix and "fsdp2" in found.fix


@pytest.mark.parametrize(
    ("type", "message"), [("MemoryError", ""), ("DistBackendError", NCCL_FULL), ("OSError", "Cannot allocate memory")]
)
def test_memory_by_other_words(type, message):
    assert (
        "smaller --batch-size"
        in first(fold(spec(), start(0, 1), error(1, message, type), status("failed")), "out_of_memory").fix
    )
