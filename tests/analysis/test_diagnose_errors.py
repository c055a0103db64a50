"""Findings about failed runs: errors recognised by their message, and the rank that failed first."""

from __future__ import annotations

import pytest
from diagnosed import (
    CLOSED,
    GONE,
    NCCL_CUDA,
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

from labkit.analysis.diagnose import RULES, findings
from labkit.record.stacks import place
from labkit.training.faults import FAULTS

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"

UNIFORM = "FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}"
CONVOLVED = "Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same"

# ---- errors recognised by their message


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
            (
                "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers"
                " are out of shared memory. Please try to raise your shared memory limit."
            ),
            "pid 71",
        ),
        (
            "shared_memory",
            "RuntimeError",
            "unable to write to file </torch_81_33_0>: No space left on device (28)",
            "/torch_81_33_0",
        ),
        ("disk_full", "OSError", "[Errno 28] No space left on device: '/data/model.pt'", "/data/model.pt"),
        ("no_nccl", "RuntimeError", "Distributed package doesn't have NCCL built in", "NCCL"),
        ("no_nccl", "RuntimeError", "No backend type associated with device type cuda", "cuda"),
        ("old_driver", "RuntimeError", "The NVIDIA driver on your system is too old (found version 11040).", "11040"),
        (
            "no_kernel",
            "AcceleratorError",
            "CUDA error: no kernel image is available for execution on the device",
            "kernel image",
        ),
        (
            "forked_cuda",
            "RuntimeError",
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, …",
            "forked",
        ),
        (
            "no_such_gpu",
            "AcceleratorError",
            "CUDA error: invalid device ordinal\nGPU device may be out of range, …",
            "ordinal",
        ),
        (
            "collective_timeout",
            "DistBackendError",
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.",
            "OpType=ALLREDUCE",
        ),
        (
            "one_gpu_twice",
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\nLast error:\nDuplicate GPU detected :"
            " rank 1 and rank 0 both on CUDA device 1e0",
            "rank 1 and rank 0",
        ),
        (
            "device_assert",
            "AcceleratorError",
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some …",
            "assert",
        ),
        (
            "no_interface",
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:94, internal error\nLast error:\nBootstrap : no socket interface found",
            "no socket interface",
        ),
        (
            "loss_scale_at_minimum",
            "Exception",
            "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "minimum",
        ),
        (
            "lazy_import",
            "ModuleNotFoundError",
            "Could not import module 'GPT2LMHeadModel'. Are this object's requirements defined correctly? Set the"
            " logging verbosity to DEBUG for the original import error.",
            "GPT2LMHeadModel",
        ),
        ("devices_differ", "RuntimeError", TWO_DEVICES, "cuda:0 and cpu"),
        (
            "graph_not_static",
            "RuntimeError",
            "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but"
            " then got used in the second iteration. this is not compatible with static_graph set to True.",
            "static_graph",
        ),
        (
            "shared_by_units",
            "ValueError",
            "Parameter 'out.weight' is shared with a parameter already managed by another FSDP group. For shared/tied"
            " parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP group.",
            "out.weight",
        ),
        (
            "recomputed_differently",
            "CheckpointError",
            "torch.utils.checkpoint: A different number of tensors was saved during the original forward and"
            " recomputation.\nNumber of tensors saved during forward: 9",
            "A different number",
        ),
        (
            "recomputed_differently",
            "CheckpointError",
            "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during"
            " the forward pass.\ntensor at position 3:",
            "different metadata",
        ),
        (
            "attribute_of_wrapper",
            "AttributeError",
            "'DistributedDataParallel' object has no attribute 'generate'",
            "'generate'",
        ),
        ("uniform_units", "AssertionError", UNIFORM, "torch.bfloat16"),
        ("no_data_on_meta", "NotImplementedError", "Cannot copy out of meta tensor; no data! Please use …", "no data"),
        (
            "dtypes_differ",
            "RuntimeError",
            "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
            "Float",
        ),
        ("dtypes_differ", "RuntimeError", CONVOLVED, "HalfTensor"),
        ("index_out_of_range", "IndexError", "Target 10 is out of bounds.", "10"),
        ("index_out_of_range", "IndexError", "index out of range in self", "index"),
        (
            "samples_of_unequal_size",
            "RuntimeError",
            "stack expects each tensor to be equal size, but got [12] at entry 0 and [9] at entry 1",
            "[9] at entry 1",
        ),
        ("nothing_to_optimize", "ValueError", "optimizer got an empty parameter list", "empty"),
        (
            "deepspeed_twice",
            "AssertionError",
            "The parameter 3 has already been reduced.             Gradient computed twice for this partition."
            "             Multiple gradient reduction is currently not supported",
            "parameter 3",
        ),
        ("peer_access", "DistBackendError", NCCL_CUDA, "peer access is not supported"),
        (
            "nccl",
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:94, internal error, NCCL version 2.21.5",
            "internal",
        ),
        ("gpu_fault", "RuntimeError", "CUDA error: uncorrectable ECC error encountered", "ECC"),
        ("gpu_fault", "RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution", "NVLink"),
        ("fabric_manager", "RuntimeError", "CUDA error: system not yet initialized", "not yet"),
        ("illegal_access", "AcceleratorError", "CUDA error: an illegal memory access was encountered", "illegal"),
        ("name_not_resolved", "ValueError", "host not found: Name or service not known", "host not found"),
    ],
)
def test_an_error_that_says_what_it_is(name, type, message, evidence):
    state = fold(spec(), start(0, 1), error(1, message, type), error(0, GONE, t=501.0), status("failed"))
    found = first(state, name)
    assert found.ranks == (1, 0) and evidence in found.evidence and len(found.evidence) <= 300
    assert names(state) == [name]


def test_what_torchrun_says_counts_where_no_rank_said_anything():
    state = fold(spec(), {"kind": "status", "status": {"state": "failed", "message": PORT}})
    assert first(state, "port_taken").ranks == ()


@pytest.mark.parametrize(
    "message",
    ["/dev/shm/digits.npz: no such file", "CUDA driver initialization failed"],
)
def test_an_error_that_only_resembles_one_is_a_failure(message):
    assert names(fold(spec(), start(0, 1), error(1, message, "OSError"), status("failed"))) == ["first_failure"]


# ---- the rank that failed first


@pytest.mark.parametrize("complaint", [GONE, CLOSED, NCCL_GONE])
def test_a_killed_rank_is_the_cause_and_not_those_that_complain(complaint):
    state = fold(spec(), start(0, 1), steps(0), steps(1), error(0, complaint), status("failed", rank0=-15, rank1=-9))
    found = first(state, "first_failure")
    assert (
        found.title == "rank 1 failed first: SIGKILL; rank 0 was terminated because rank 1 failed"
        and found.ranks == (1, 0)
    )
    assert found.evidence == "SIGKILL" and "killed from outside" in found.cause and len(findings(state)) == 1


def test_a_rank_killed_by_the_injected_fault_was_not_killed_from_outside():
    state = fold(spec(fault="killed_rank"), start(0, 1), steps(0), steps(1), status("failed", rank0=-15, rank1=-9))
    cause = first(state, "first_failure").cause
    assert "the injected fault: a rank is killed" in cause and "outside" not in cause


def test_a_complaint_is_not_called_first_before_torchrun_has_reported():
    going = fold(spec(), start(0, 1), error(0, GONE), status("running"))
    found = first(going, "first_failure")
    assert found.title.startswith("rank 0 failed: RuntimeError") and "another rank is gone" in found.cause
    over = fold(spec(), start(0, 1), error(0, GONE), status("failed", rank0=1, rank1=-9))
    assert first(over, "first_failure").title.startswith("rank 1 failed first: SIGKILL")


def test_an_exception_is_told_with_its_line():
    state = fold(
        spec(nproc=3),
        start(0, 1, 2),
        error(2, "bad sample", "ValueError", at=(41, "load")),
        error(0, GONE),
        status("failed"),
    )
    found = first(state, "first_failure")
    assert found.ranks == (2, 0, 1) and found.evidence == "ValueError: bad sample (train.py:41 in load)"


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
    state = fold(
        spec(),
        start(0, 1),
        waiting(0, op()),
        error(1, "bad sample", "ValueError"),
        error(0, GONE, t=501.0),
        status("failed"),
    )
    assert names(state) == ["first_failure"] and findings(state)[0].ranks == (1, 0)


NAME_ERROR = "name 'undefined' is not defined"


def test_the_same_mistake_on_every_rank():
    state = fold(
        spec(),
        start(0, 1),
        *(error(rank, NAME_ERROR, "NameError", t=500.0 + rank, at=(12, "main")) for rank in (0, 1)),
        status("failed"),
    )
    found = first(state, "first_failure")
    assert (
        found.title
        == "all 2 ranks failed in the same way: NameError: name 'undefined' is not defined (train.py:12 in main)"
    )
    assert found.ranks == (0, 1) and state.failure.collateral == [] and "terminated" not in found.title
    assert state.words == "failed (all 2 ranks: NameError: name 'undefined' is not defined)"


def test_the_same_mistake_on_some_ranks():
    mistakes = [
        error(rank, f"index {rank + 5} is out of bounds", "IndexError", t=500.0 - rank, at=(12, "main"))
        for rank in (0, 2)
    ]
    found = first(
        fold(spec(nproc=3), start(0, 1, 2), mistakes, error(1, GONE, t=499.0), status("failed")), "first_failure"
    )
    assert found.title.startswith(
        "ranks 0, 2 failed in the same way: IndexError: index 7 is out of bounds (train.py:12 in main); rank 1 was"
    )
    assert found.title.endswith("rank 1 was terminated because they failed") and found.ranks == (2, 0, 1)


@pytest.mark.parametrize(
    "other",
    [
        error(1, NAME_ERROR, "NameError", t=501.0, at=(40, "main")),  # the same words at another line
        error(1, "name 'other' is not defined", "NameError", t=501.0, at=(12, "main")),
        error(1, NAME_ERROR, "UnboundLocalError", t=501.0, at=(12, "main")),
    ],
)
def test_mistakes_that_only_resemble_each_other(other):
    state = fold(spec(), start(0, 1), error(0, NAME_ERROR, "NameError", at=(12, "main")), other, status("failed"))
    assert first(state, "first_failure").title.startswith(
        "rank 0 failed first: NameError"
    ) and state.failure.collateral == [1]


def test_a_syntax_error_and_a_rank_that_left_no_event():
    """Rank 1 is known only from torchrun's report, with the last line of its stderr."""
    text = (
        'Traceback:\n  File "/home/ann/train.py", line 3\n    def broken(:\n               ^\nSyntaxError: invalid'
        " syntax"
    )
    one = {
        "kind": "error",
        "t": 5.0,
        "rank": 0,
        "type": "SyntaxError",
        "message": "invalid syntax (train.py, line 3)",
        "traceback": text,
    }
    state = fold(spec(), start(0), one, status("failed", rank1=(1, "SyntaxError: invalid syntax (train.py, line 3)")))
    found = first(state, "first_failure")
    assert found.title == "all 2 ranks failed in the same way: SyntaxError: invalid syntax (train.py, line 3)"
    assert place(text) == "train.py:3"
    missing = [
        error(rank, "[Errno 2] No such file or directory: '/home/ann/trian.py'", "FileNotFoundError", at=None)
        for rank in (0, 1)
    ]
    found = first(
        fold(spec(), start(0, 1), [one | {"message": "no file", "traceback": ""} for one in missing], status("failed")),
        "first_failure",
    )
    assert found.title == "all 2 ranks failed in the same way: FileNotFoundError: no file"


def test_ranks_that_left_no_event_at_all():
    lost = {f"rank{rank}": (1, "ModuleNotFoundError: No module named 'torch'") for rank in (0, 1)}
    found = first(fold(spec(), status("failed", **lost)), "first_failure")
    assert found.title == "all 2 ranks failed in the same way: ModuleNotFoundError: No module named 'torch'"


def test_one_rank_alone_failed_first_of_nobody():
    found = first(
        fold(spec("single", 1), start(0), error(0, "bad", "ValueError", at=(3, "main")), status("failed")),
        "first_failure",
    )
    assert found.title == "rank 0 failed: ValueError: bad (train.py:3 in main)"


# ---- the table of faults


def test_every_fault_of_the_lab_has_a_rule_that_names_it():
    told = {name for name, *_ in test_an_error_that_says_what_it_is.pytestmark[0].args[1]}
    assert {fault.finding for fault in FAULTS.values()} <= told | {rule.__name__ for rule in RULES}
