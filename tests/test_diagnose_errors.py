"""Findings about runs that failed: errors that say what they are, who was first, and memory that ran out."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    CPU_FULL,
    CUDA_FULL,
    GONE,
    MIB,
    NCCL_CUDA,
    NCCL_FULL,
    NCCL_GONE,
    NCCL_SHM,
    PORT,
    UNUSED,
    error,
    first,
    fold,
    names,
    op,
    spec,
    start,
    status,
    steps,
    waiting,
)

from labkit.diagnose import RULES, findings
from labkit.diagnose.finding import place
from labkit.faults import FAULTS
from labkit.state import RunState

# ---- errors that say what they are


@pytest.mark.parametrize(
    ("name", "type", "message", "evidence"),
    [
        ("unused_parameters", "RuntimeError", UNUSED, "parameters that were not used in producing loss"),
        ("shuffle_beside_sampler", "ValueError", "sampler option is mutually exclusive with shuffle", "shuffle"),
        ("port_taken", "DistNetworkError", PORT, "29500"),
        ("port_taken", "OSError", "[Errno 98] Address already in use", "98"),
        ("shared_memory", "DistBackendError", NCCL_SHM, "size 9637888"),
        (
            "shared_memory",
            "RuntimeError",
            "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. "
            "Please try to raise your shared memory limit.",
            "pid 71",
        ),
        ("shared_memory", "RuntimeError", "unable to write to file </torch_81_33_0>: No space left on device (28)", "/torch_81_33_0"),
        ("no_nccl", "RuntimeError", "Distributed package doesn't have NCCL built in", "NCCL"),
        ("no_nccl", "RuntimeError", "No backend type associated with device type cuda", "cuda"),
        ("old_driver", "RuntimeError", "The NVIDIA driver on your system is too old (found version 11040).", "11040"),
        ("no_kernel", "AcceleratorError", "CUDA error: no kernel image is available for execution on the device", "kernel image"),
        ("forked_cuda", "RuntimeError", "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, …", "forked"),
        ("no_such_gpu", "AcceleratorError", "CUDA error: invalid device ordinal\nGPU device may be out of range, …", "ordinal"),
        ("nccl", "DistBackendError", NCCL_CUDA, "peer access is not supported"),
    ],
)
def test_an_error_that_says_what_it_is(name, type, message, evidence):
    state = fold(spec(), start(0, 1), error(1, message, type), error(0, GONE, t=501.0), status("failed"))
    found = first(state, name)
    assert found.ranks == (1,) and evidence in found.evidence and len(found.evidence) <= 300
    assert names(state) == [name, "first_failure"]


def test_what_torchrun_says_counts_where_no_rank_said_anything():
    state = fold(spec(), {"kind": "status", "status": {"state": "failed", "message": PORT}})
    assert first(state, "port_taken").ranks == ()


@pytest.mark.parametrize(
    "message",
    ["/dev/shm/digits.npz: no such file", "[Errno 28] No space left on device: '/data/model.pt'", "CUDA driver initialization failed"],
)
def test_an_error_that_only_resembles_one_is_a_failure(message):
    assert names(fold(spec(), start(0, 1), error(1, message, "OSError"), status("failed"))) == ["first_failure"]


# ---- who was first


@pytest.mark.parametrize("complaint", [GONE, CLOSED, NCCL_GONE])
def test_a_killed_rank_is_the_cause_and_not_those_that_complain(complaint):
    state = fold(spec(), start(0, 1), steps(0), steps(1), error(0, complaint), status("failed", rank0=-15, rank1=-9))
    found = first(state, "first_failure")
    assert found.title == "rank 1 failed first; rank 0 fell with it" and found.ranks == (1, 0)
    assert found.evidence == "SIGKILL" and "killed from outside" in found.cause and len(findings(state)) == 1


def test_an_exception_is_told_with_its_line():
    state = fold(spec(nproc=3), start(0, 1, 2), error(2, "bad sample", "ValueError", at=(41, "load")), error(0, GONE), status("failed"))
    found = first(state, "first_failure")
    assert found.ranks == (2, 0, 1) and found.evidence == "ValueError: bad sample (at train.py:41 in load)"


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/ann/train.py", "train.py:7 in main"),
        (r"C:\Users\ann\train.py", "train.py:7 in main"),
        ("/usr/lib/python3.11/threading.py", "lib.py:3 in outer"),
        (r"C:\venv\Lib\site-packages\torch\nn.py", "lib.py:3 in outer"),
    ],
)
def test_the_innermost_line_that_is_no_library(file, shown):
    assert place(f'  File "/home/ann/lib.py", line 3, in outer\n  File "{file}", line 7, in main') == shown
    assert place("") == place(None) == place("Segmentation fault") == ""


def test_a_long_message_is_cut():
    found = first(fold(spec(), start(0, 1), error(0, "x" * 9000), status("failed")), "first_failure")
    assert len(found.evidence) < 400 and "…" in found.evidence


def test_an_exception_outranks_the_wait_for_it():
    """Rank 0 waited while rank 1 was busy until it failed: the exception is the cause."""
    state = fold(spec(), start(0, 1), waiting(0, op()), error(1, "bad sample", "ValueError"), error(0, GONE, t=501.0), status("failed"))
    assert names(state) == ["first_failure"] and findings(state)[0].ranks == (1, 0)


# ---- memory


def test_a_tensor_that_no_device_has_room_for():
    held = {"parameters": 2 * MIB, "activations": MIB, "gradients": 0}
    state = fold(spec(), start(0, 1), error(1, CPU_FULL, at=(139, "disturb"), owners=held), error(0, GONE, t=501.0), status("failed"))
    found = first(state, "out_of_memory")
    assert found.ranks == (1, 0) and found.title == "rank 1 ran out of memory at train.py:139 in disturb"
    assert "1125899906842624 bytes" in found.evidence and "parameters 2.0 MiB, activations 1.0 MiB" in found.evidence
    assert "gradients" not in found.evidence and "1.0 PiB" in found.cause and "no setting would have fitted" in found.way_out


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
    assert f"a batch of {fits} per rank would have fitted" in found.way_out and "2.0 GiB more" in found.cause
    assert "activations 12.0 GiB, parameters 2.0 GiB" in found.evidence


@pytest.mark.parametrize("held", [{}, {"parameters": 2}])
def test_nothing_is_computed_from_a_breakdown_that_is_not_there(held):
    assert first(full(held), "out_of_memory").way_out.startswith("a smaller batch, accumulate=2")


def test_no_batch_fits_where_the_rest_fills_the_device():
    found = first(full({"parameters": 5.1, "optimizer": 10.2, "activations": 0.1}), "out_of_memory")
    assert "15.3 GiB of 16.0 GiB" in found.way_out and "fsdp2" in found.way_out


@pytest.mark.parametrize(("type", "message"), [("MemoryError", ""), ("DistBackendError", NCCL_FULL), ("OSError", "Cannot allocate memory")])
def test_memory_by_other_words(type, message):
    assert "smaller batch" in first(fold(spec(), start(0, 1), error(1, message, type), status("failed")), "out_of_memory").way_out


# ---- the table of faults


def test_every_fault_of_the_lab_has_a_rule_that_names_it():
    told = {name for name, *_ in test_an_error_that_says_what_it_is.pytestmark[0].args[1]}
    assert {fault.finding for fault in FAULTS.values()} <= told | {rule.__name__ for rule in RULES}
