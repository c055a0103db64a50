"""The diagnosis: for every rule what must give its finding, with the evidence a person needs, and the nearest that must not."""

from __future__ import annotations

import json
import math

import pytest

from labkit.diagnose import RULES, findings
from labkit.diagnose.finding import place
from labkit.events import Writer
from labkit.faults import FAULTS
from labkit.launch.folder import RunFolder
from labkit.launch.follow import Follower
from labkit.spec import Spec
from labkit.state import RunState

SITE = "/home/ann/.venv/lib/python3.11/site-packages/torch/distributed"
MIB = 1 << 20

# What torch 2.13, gloo and NCCL say, word for word but for numbers.
GONE = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2747: Connection reset by peer. "
    "This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker before reporting "
    "an error. GLHF! 🏖️"
)
CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38279. This is typically "
    "caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
UNLIKE = (
    "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 1024 vs 1000. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
DETAIL = (
    "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=10, "
    "OpType=BARRIER), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=10, OpType=ALLREDUCE, TensorShape=[405898], "
    "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))."
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}\nLast error:\n{}"
NCCL_GONE = NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketProgress: Connection closed by remote peer node1<45873>",
)
NCCL_CUDA = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Cuda failure 217 'peer access is not supported between these two devices'",
)
NCCL_SHM = NCCL.format(
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 9637888), error: No space left on device (28)",
)
NCCL_FULL = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Failed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'",
)
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds "
    "before timing out."
)
UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has "
    "parameters that were not used in producing loss. You can enable unused parameter detection by passing the keyword argument "
    "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`"
)
PORT = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, "
    "message: address already in use"
)
CPU_FULL = (
    "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 "
    "bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 16.00 GiB of which 1.00 GiB is free. Including "
    "non-PyTorch memory, this process has 15.00 GiB memory in use. Of the allocated memory 14.00 GiB is allocated by PyTorch"
)


# ---- events, as short as a test can write them


def spec(strategy: str = "ddp", nproc: int = 2, **asked) -> dict:
    asked = {"workload": "cnn", "steps": 100, "device": "cpu"} | asked
    return {"kind": "spec", "spec": Spec(strategy=strategy, nproc=nproc, **asked).to_json()}


def script(nproc: int = 2) -> dict:
    return {"kind": "spec", "spec": {"script": "train.py", "nproc": nproc}}


def status(state: str, **failures) -> dict:
    """`rank1=-9` is a rank that torchrun has seen die."""
    names = {-6: "SIGABRT", -9: "SIGKILL", -15: "SIGTERM"}
    codes = {name.removeprefix("rank"): code if isinstance(code, tuple) else (code, "") for name, code in failures.items()}
    failed = {name: {"exit_code": code, "signal": names.get(code), "t": 9e9, "message": said} for name, (code, said) in codes.items()}
    return {"kind": "status", "status": {"state": state, "failures": failed}}


def start(*ranks: int, **fields) -> list[dict]:
    return [{"kind": "start", "t": 0.0, "rank": rank, "pid": 100 + rank, "host": "here", "device": "cpu"} | fields for rank in ranks]


def saw(rank: int, what: str, **fields) -> dict:
    return {"kind": "saw", "t": 1.0, "rank": rank, "what": what} | fields


def activity(rank: int, name: str) -> dict:
    return {"kind": "activity", "t": 1.0, "rank": rank, "name": name}


def end(rank: int, code: int = 0) -> dict:
    return {"kind": "end", "t": 900.0, "rank": rank, "exit_code": code}


def stack(line: int, function: str) -> str:
    """A stack as it is told: the script's own line, and the library that it stands in."""
    return f'  File "/runs/one/train.py", line {line}, in {function}\n    …\n  File "{SITE}/c10d_logger.py", line 83, in wrapper\n    …'


def error(rank: int, message: str, type: str = "RuntimeError", t: float = 500.0, at=(113, "train_step"), **fields) -> dict:
    told = {"type": type, "message": message, "traceback": f"Traceback:\n{stack(*at)}\n{type}: {message}"} if at else {"type": type}
    return {"kind": "error", "t": t, "rank": rank, "ops": []} | told | fields


def op(name: str = "all_reduce", seq: int = 10, sizes=((405898,),), over: bool = False, ranks=(0, 1), group: str = "default_pg") -> dict:
    return {"op": name, "group": group, "ranks": list(ranks), "seq": seq, "sizes": [list(size) for size in sizes], "over": over}


def waiting(rank: int, *ops: dict, computed=0.0, at=(113, "train_step"), step: int = 4, **fields) -> dict:
    told = {"since": 100.0, "step": step, "phase": "backward", "computed": computed, "stack": stack(*at), "ops": list(ops)}
    return {"kind": "waiting", "t": 142.0, "rank": rank, "activity": "training"} | told | fields


def steps(rank: int, count: int = 12, first: int = 1, loss=1.0, **seconds) -> list[dict]:
    """Steps of 100 ms; a phase that is given takes so long instead."""
    usual = {"data": 0.005, "copy": 0.0, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.005} | seconds
    whole = {"step": max(0.1, sum(usual.values()))} | usual
    numbers = range(first, first + count)
    told = [{"kind": "step", "t": 10 + number / 10, "rank": rank, "step": number, "samples": 8, "seconds": whole} for number in numbers]
    return [event | {"loss": loss(event["step"]) if callable(loss) else loss} for event in told]


def timeline(rank: int, step: int = 50, exposed: float = 0.05, op: str = "all_reduce") -> dict:
    comm = [[op, 0.04, 0.04 + exposed, 1605632, "default_pg", [0, 1], 57]]
    told = {"t0": 15.0, "seconds": 0.1, "device": "cpu", "backend": "gloo", "phases": [["backward", 0.0, 0.1]], "comm": comm}
    return {"kind": "timeline", "t": 16.0, "rank": rank, "step": step, "busy": [], "marks": [], "exposed": {"backward": exposed}} | told


def traffic(rank: int, **ops) -> dict:
    told = {name: {"calls": calls, "bytes": size, "sent": float(size)} for name, (calls, size) in ops.items()}
    return {"kind": "traffic", "t": 2.0, "rank": rank, "step": 2, "ops": told}


def batches(rank: int, *digests: str) -> list[dict]:
    return [saw(rank, "batch", step=number + 1, digest=digest) for number, digest in enumerate(digests)]


def ddp(*ranks: int) -> list[dict]:
    return [saw(rank, "model", name="DistributedDataParallel", units=0, parameters=405898) for rank in ranks]


def epoch(rank: int, sampler: int, number: int, shuffle: bool = True) -> dict:
    return saw(rank, "epoch", sampler=sampler, set=number, shuffle=shuffle, ranks=2)


def loader(rank: int, length: int | None) -> dict:
    return saw(rank, "loader", batches=length, samples=512, sampler="DistributedSampler")


def memory(rank: int, peak: int, **at_peak: int) -> dict:
    told = {"step": 2, "t0": 1.0, "seconds": 0.1, "phases": [], "times": [0.0], "owners": {"activations": [0]}}
    return {"kind": "memory_step", "t": 2.0, "rank": rank, "peak": peak, "at_peak": at_peak} | told


def fold(*events) -> RunState:
    """The state after events, or lists of them."""
    state = RunState()
    for event in events:
        for one in event if isinstance(event, list) else [event]:
            state.apply(one)
    return state


def names(state: RunState) -> list[str]:
    return [finding.name for finding in findings(state)]


def first(state: RunState, name: str):
    """The first finding, which must be the one."""
    found = findings(state)
    assert found and found[0].name == name, [one.name for one in found]
    assert found[0].title and found[0].evidence and found[0].cause and found[0].way_out
    return found[0]


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


# ---- ranks that do not meet


def test_ranks_with_unlike_numbers_of_batches():
    aborted = status("failed", rank0=-15, rank1=(-6, UNLIKE))
    state = fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), error(0, GONE), aborted)
    found = first(state, "uneven_inputs")
    assert found.ranks == (1,) and found.title == "rank 1 had 5 batches, and others up to 16" and "0: 16, 1: 5" in found.evidence
    state = fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), error(0, DETAIL), status("failed"))
    assert names(state) == ["uneven_inputs", "mismatch", "first_failure"]
    last = [waiting(0, op()), activity(0, "training"), activity(1, "evaluating"), end(1)]
    assert names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), last)) == ["uneven_inputs", "hang"]
    last = [waiting(0, op()), activity(0, "training"), activity(1, "evaluating"), waiting(1, op("barrier"))]
    assert "evaluation_on_one_rank" not in names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), last))


@pytest.mark.parametrize(
    "events",
    [
        [waiting(0, op()), end(0), end(1), status("finished")],  # it had waited once, and went on
        [waiting(0, op(over=True), computed=0.9)],  # a long forward that computes
        [waiting(0, op(), step=4), *steps(0, 6)],  # steps have come since
        [error(1, "bad sample", "ValueError"), error(0, GONE, t=501.0), status("failed")],  # failed for a reason of its own
        [error(0, GONE), status("failed", rank1=-9)],  # was killed
    ],
)
def test_unlike_numbers_of_batches_are_no_finding_alone(events):
    assert "uneven_inputs" not in names(fold(spec(), start(0, 1), loader(0, 16), loader(1, 5), events))


def test_a_run_with_join_may_have_unlike_numbers_of_batches():
    asked = spec(options={"join": True})
    assert names(fold(asked, start(0, 1), loader(0, 16), loader(1, 5), waiting(0, op()))) == ["hang"]
    assert names(fold(spec(), start(0, 1), loader(0, None), loader(1, 5), waiting(0, op()))) == ["hang"]  # a stream has no length


def test_an_evaluation_on_one_rank():
    imports, failed = waiting(0, computed=0.3, at=(14, "<module>"), step=0), error(0, CLOSED, at=(129, "evaluate"))
    state = fold(spec(), start(0, 1), imports, activity(0, "evaluating"), activity(1, "training"), end(1), failed, status("failed"))
    found = first(state, "evaluation_on_one_rank")
    assert found.ranks == (0, 1) and "train.py:129 in evaluate" in found.evidence and "rank 1 had left" in found.evidence


def test_an_evaluation_on_one_rank_that_holds_all_up():
    stood = [waiting(0, op("all_gather", 31), at=(129, "evaluate")), waiting(1, op("all_reduce", 31))]
    found = first(fold(spec(), start(0, 1), activity(0, "evaluating"), activity(1, "training"), stood), "evaluation_on_one_rank")
    assert "rank 1 went on training" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [activity(1, "evaluating"), waiting(0, op()), waiting(1, op())],  # all evaluate
        [activity(1, "training"), waiting(1, op("barrier", 31, ()), at=(150, "main"))],  # rank 0 computes, the other waits at a barrier
        [activity(1, "training"), error(0, "no such metric", "KeyError"), status("failed")],  # a failure of its own
        [activity(1, "training"), error(0, GONE), status("failed", rank1=-9)],  # the other was killed
        [activity(1, "training"), end(0), end(1), status("finished")],
    ],
)
def test_what_looks_like_an_evaluation_on_one_rank(events):
    assert "evaluation_on_one_rank" not in names(fold(spec(), start(0, 1), activity(0, "evaluating"), events))


def test_a_rank_that_still_trains_while_most_evaluate():
    doing = [activity(0, "training"), *(activity(rank, "evaluating") for rank in (1, 2, 3))]
    held = [waiting(rank, op("all_reduce", 31, ranks=range(4))) for rank in (1, 2, 3)]
    assert names(fold(spec(nproc=4), start(0, 1, 2, 3), doing, held)) == ["hang"]


@pytest.mark.parametrize("words", [UNLIKE, DETAIL])
def test_a_mismatch_by_the_words_of_the_backend(words):
    told = status("failed", rank0=(-6, words), rank1=-15)
    found = first(fold(spec(), start(0, 1), error(1, GONE, at=(139, "disturb")), told), "mismatch")
    assert found.ranks == (0, 1) and found.title.endswith("at train.py:139 in disturb") and words[:60] in found.evidence


def test_a_mismatch_by_what_the_ranks_were_in():
    state = fold(spec(), start(0, 1), error(0, GONE, ops=[op()]), error(1, GONE, ops=[op("barrier", sizes=())]), status("failed"))
    assert first(state, "mismatch").evidence == "rank 0 was in all_reduce number 10 (405898), rank 1 in barrier number 10"


def test_a_mismatch_that_nccl_waits_in():
    state = fold(spec(), start(0, 1), waiting(0, op(sizes=[(1000,)]), at=(139, "disturb")), waiting(1, op(sizes=[(1024,)])))
    found = first(state, "mismatch")
    assert found.evidence == "rank 0 was in all_reduce number 10 (1000), rank 1 in all_reduce number 10 (1024)"
    assert "train.py:139" in found.title and names(state) == ["mismatch", "hang"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (op("all_to_all", sizes=[(8, 4)]), op("all_to_all", sizes=[(3, 4)])),  # splits that are unlike by design
        (op("scatter", sizes=[(4,), (4,)]), op("scatter", sizes=[])),
        (op(group="mesh_tp", ranks=(0, 1)), op("all_gather", group="mesh_tp", ranks=(2, 3))),  # two groups of one name
        (op(seq=10), op("barrier", seq=11)),
    ],
)
def test_collectives_that_may_be_unlike(one, other):
    state = fold(spec(), start(0, 1), error(0, "bad", "ValueError", ops=[one]), error(1, GONE, ops=[other], t=501.0), status("failed"))
    assert names(state) == ["first_failure"]


# ---- no progress


def test_a_rank_that_skipped_a_collective():
    before = op(seq=9, over=True)
    stood = [waiting(0, before, op("barrier", sizes=()), at=(139, "disturb")), waiting(1, before, op())]
    found = first(fold(spec(), start(0, 1), steps(0, 4), steps(1, 4), stood), "hang")
    assert found.title == "rank 0 waited for 42 s in barrier number 10; rank 1 never came" and found.ranks == (1, 0)
    assert "rank 0: in barrier number 10 at train.py:139 in disturb, 4 steps done" in found.evidence
    assert "rank 1: in all_reduce number 10 (405898) at train.py:113 in train_step, 4 steps done" in found.evidence


@pytest.mark.parametrize(
    ("events", "where"),
    [
        ([], "has not begun"),
        ([*start(1), *steps(1, 7)], "goes on, 7 steps done"),
        ([*start(1), *steps(1, 7), activity(1, "evaluating")], "goes on evaluating, 7 steps done"),
        ([*start(1), end(1)], "has ended with exit code 0"),
        ([*start(1), waiting(1, computed=0.9)], "goes on, 0 steps done"),
    ],
)
def test_where_a_rank_is_that_never_came(events, where):
    found = first(fold(spec(), start(0), waiting(0, op()), events), "hang")
    assert found.ranks == (1, 0) and found.evidence.endswith(f"rank 1: {where}")


def test_a_rank_that_is_in_no_collective_is_named_before_those_that_wait_for_each_other():
    """Ranks 0 and 1 wait for ranks 2 and 3 in one group, 2 for 3 in another; 3 is somewhere else."""
    rows, columns = [op(seq=12, ranks=ranks, group="dp") for ranks in ((0, 2), (1, 3))], op(seq=500, ranks=(2, 3), group="tp")
    stood = [waiting(0, rows[0]), waiting(1, rows[1]), waiting(2, columns), waiting(3, at=(77, "save"))]
    found = first(fold(spec(nproc=4), start(0, 1, 2, 3), stood), "hang")
    assert found.title.endswith("; rank 3 never came") and found.ranks[0] == 3
    assert "rank 3: in no collective, at train.py:77 in save" in found.evidence


def test_a_group_of_one_name_and_other_ranks_is_another():
    stood = [waiting(rank, op(seq=5, ranks=(rank // 2 * 2, rank // 2 * 2 + 1), group="tp")) for rank in (0, 1, 2)]
    found = first(fold(spec(nproc=4), start(0, 1, 2, 3), stood), "hang")
    assert found.title == "rank 2 waited for 42 s in all_reduce number 5 (405898); rank 3 never came"


def test_all_ranks_in_one_collective():
    found = first(fold(spec(), start(0, 1), waiting(0, op()), waiting(1, op())), "hang")
    assert found.title.startswith("ranks 0, 1 waited") and found.title.endswith("where all of its ranks are")


def test_a_wait_that_is_no_collective():
    found = first(fold(spec(), start(0, 1), waiting(0, at=(30, "load")), waiting(1, at=(30, "load"))), "hang")
    assert found.title == "ranks 0, 1 made no progress for 42 s" and "train.py:30 in load" in found.evidence
    assert "no collective is under way" in found.cause


def test_a_wait_for_a_rank_that_goes_on_elsewhere():
    found = first(fold(spec(), start(0, 1), steps(1, 7), waiting(0, at=(30, "load"))), "hang")
    assert found.ranks == (1, 0) and found.evidence.endswith("rank 1: goes on, 7 steps done")


@pytest.mark.parametrize("computed", [None, 1.0])
def test_a_rank_in_a_collective_waits_however_busy_it_looks(computed):
    """NCCL's wait spins, and not every system says what a thread computes."""
    found = first(fold(spec(), start(0, 1), waiting(0, op(sizes=[()]), computed=computed)), "hang")
    assert "all_reduce number 10 (one number)" in found.title


def test_a_watchdog_that_ended_the_wait_leaves_it_the_cause():
    state = fold(spec(), start(0, 1), waiting(0, op()), status("failed", rank0=(-6, WATCHDOG), rank1=-15))
    assert names(state) == ["hang", "first_failure"] and findings(state)[0].ranks == (1, 0)


@pytest.mark.parametrize(
    "events",
    [
        [waiting(0, op(over=True), computed=0.9), waiting(1, op(over=True), computed=0.9)],  # a long forward
        [waiting(0, computed=0.285), waiting(1, computed=0.296)],  # imports
        [waiting(0, computed=None), waiting(1, computed=None)],  # not known whether it computes
        [waiting(0, op()), {"kind": "going_on", "t": 150.0, "rank": 0}],
        [waiting(0, op()), *steps(0, 6)],
        [waiting(0, op()), end(0), end(1), status("finished")],
        [waiting(0, op()), end(0), status("stopped")],
        [waiting(0, "all_reduce", computed=0.9)],
        [waiting(0, op()), *start(0, 1, attempt=1)],  # of the attempt before
        [activity(0, "training"), activity(1, "training")],
    ],
)
def test_what_is_no_hang(events):
    assert names(fold(spec(), start(0, 1), events)) == []


# ---- another training than was meant


def test_the_same_samples_on_every_rank():
    state = fold(spec(), start(0, 1), batches(0, "a", "b", "c"), batches(1, "a", "b", "c"))
    found = first(state, "same_samples")
    assert found.ranks == (0, 1) and "3 of 3 steps" in found.evidence and "1 different batches a step, and 2 were meant" in found.evidence
    assert "DistributedSampler" in found.way_out


def test_two_of_four_ranks_with_the_same_samples():
    state = fold(spec(nproc=4), *(batches(rank, f"{min(rank, 2)}") for rank in range(4)))
    assert first(state, "same_samples").ranks == (2, 3)


def test_the_same_samples_in_a_script_of_ones_own():
    same = [*batches(0, "a", "b"), *batches(1, "a", "b")]
    assert "same_samples" in names(fold(script(), start(0, 1), ddp(0, 1), same))
    assert names(fold(script(), start(0, 1), same)) == []  # not known how it splits
    assert names(fold(script(), start(0, 1), ddp(0), saw(1, "model", name="Net", units=0, parameters=9), same)) == []


@pytest.mark.parametrize(
    ("asked", "digests"),
    [
        (spec(), ["ab", "cd"]),
        (spec(), ["ab", "ad"]),  # once alike is chance
        (spec(), ["ab", ""]),  # nothing known of one
        (spec("tp"), ["ab", "ab"]),
        (spec("fsdp2_tp", 4), ["ab", "ab", "cd", "cd"]),
        (spec("pp"), ["ab", "ab"]),
    ],
)
def test_samples_that_are_as_meant(asked, digests):
    assert names(fold(asked, *(start(rank) + batches(rank, *those) for rank, those in enumerate(digests)))) == []


@pytest.mark.parametrize(
    ("before", "after", "times"),
    [
        ([(0, 0)], [(0, 0)], 2),
        ([(0, 0)], [(1, 0), (0, 0), (1, 0)], 2),
        ([(1, 0), (0, 0)], [(1, 0), (0, 0)], 2),
        ([(0, 3)], [(0, 3)] * 3, 4),
    ],
)
def test_a_sampler_that_nobody_told_the_epoch(before, after, times):
    """Sampler 0 is the one whose samples the model is trained on; 1 is for validation."""
    seen = [[epoch(rank, *one) for one in before] + ddp(rank) + [epoch(rank, *one) for one in after] for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *seen), "no_set_epoch")
    assert found.ranks == (0, 1) and f"began {times} epochs with the same epoch number, {before[-1][1]}" in found.evidence


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(0, 1)], [(0, 2), (0, 3)]),
        ([(0, 0)], [(1, 0), (0, 1), (1, 0)]),  # a validation sampler that shuffles
        ([(1, 0), (0, 0)], [(1, 0), (0, 1)]),  # one that is tried before the training
        ([(0, 0)], [(1, 0), (1, 0), (1, 0)]),  # evaluated often
        ([(0, 0), (0, 0)], [(0, 1)]),  # somebody had a look at one batch first
        ([], [(1, 0), (1, 0)]),  # training has no such sampler
        ([(0, 0, False)], [(0, 0, False)]),  # does not shuffle
    ],
)
def test_samplers_that_may_begin_so(before, after):
    seen = [[epoch(rank, *one) for one in before] + ddp(rank) + [epoch(rank, *one) for one in after] for rank in (0, 1)]
    assert names(fold(spec(), start(0, 1), *seen)) == []


def test_a_loss_that_is_no_number_on_all_ranks_at_once():
    spoilt = [steps(rank, loss=lambda step: 1.0 if step < 6 else math.nan) for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), *spoilt), "nan_loss")
    assert found.ranks == (0, 1) and "from step 6 on" in found.title and "in step 5 one rank's gradient" in found.cause


@pytest.mark.parametrize(
    ("asked", "losses", "ranks", "step"),
    [
        (spec(), (lambda step: 1.0, lambda step: 1.0 if step < 9 else math.inf), (1,), 9),
        (spec(), (lambda step: math.nan,) * 2, (0, 1), 1),
        (spec("tp"), (lambda step: 1.0 if step < 6 else math.nan,) * 2, (0, 1), 6),
        (spec("pp"), (lambda step: None, lambda step: 1.0 if step < 6 else math.nan), (1,), 6),
    ],
)
def test_a_loss_that_is_no_number_where_no_exchange_spoilt_it(asked, losses, ranks, step):
    state = fold(asked, start(0, 1), *(steps(rank, loss=loss) for rank, loss in enumerate(losses)))
    found = next(one for one in findings(state) if one.name == "nan_loss")
    assert found.ranks == ranks and f"from step {step} on" in found.title and "this rank" in found.cause
    assert ("were finite" in found.evidence) == (step > 1)


@pytest.mark.parametrize("loss", [None, 0.5, lambda step: None if step % 2 else 1e30])
def test_losses_that_are_null_or_finite(loss):
    assert names(fold(spec(), start(0, 1), steps(0, loss=loss), steps(1, loss=loss))) == []


def test_ranks_that_must_have_one_loss():
    state = fold(spec("tp"), start(0, 1), steps(0, loss=0.5), steps(1, loss=lambda step: 0.5 if step < 3 else 0.6))
    found = first(state, "loss_differs")
    assert found.ranks == (0, 1) and found.evidence == "step 3: 0.500000, 0.600000"
    state = fold(spec("fsdp2_tp", 4), *(steps(rank, loss=(0.5, 0.5, 0.7, 0.8)[rank]) for rank in range(4)))
    assert first(state, "loss_differs").ranks == (2, 3)


@pytest.mark.parametrize(
    ("asked", "events"),
    [
        (spec(), [*steps(0, loss=0.5), *steps(1, loss=0.7)]),  # each its own share of the batch
        (spec("tp"), [*steps(0, loss=0.5), *steps(1, loss=0.50001)]),  # rounding
        (spec("tp"), [*steps(0, loss=0.5), *steps(1, loss=None)]),
        (spec("pp"), [*steps(0, loss=None), *steps(1, loss=0.5)]),
        (spec("tp"), [*steps(0, loss=lambda step: 1 / step), *steps(1, first=4, loss=lambda step: 1 / step)]),  # lines were lost
        (
            spec("tp"),  # one wrote a step less before the restart
            [
                *(one for rank in (0, 1) for one in steps(rank, 5 - rank, loss=lambda step: 1 / step)),
                *start(0, 1, attempt=1),
                *(one for rank in (0, 1) for one in steps(rank, 5, loss=lambda step: 1 / step)),
            ],
        ),
    ],
)
def test_losses_that_may_differ(asked, events):
    assert names(fold(asked, start(0, 1), events)) == []


def test_one_file_of_several_ranks():
    saves = [saw(rank, "save", path="/runs/one/model.pt", step=step) for step in (5, 10) for rank in (0, 1)]
    found = first(fold(spec(), start(0, 1), saves), "one_file")
    assert found.ranks == (0, 1) and "/runs/one/model.pt, after step 5" in found.evidence and "1 times more" in found.evidence


@pytest.mark.parametrize(
    "saves",
    [
        [saw(0, "save", path="/runs/one/model.pt", step=5), saw(0, "save", path="/runs/one/model.pt", step=5)],
        [saw(rank, "save", path=f"/runs/one/rank{rank}.pt", step=5) for rank in (0, 1)],
        [*start(1, host="there"), *(saw(rank, "save", path="/tmp/model.pt", step=5) for rank in (0, 1))],  # two machines' own disks
    ],
)
def test_files_that_nobody_shares(saves):
    assert names(fold(spec(), start(0, 1), saves)) == []


# ---- slower, or larger, than need be


def test_steps_that_wait_for_data():
    found = first(fold(spec(), start(0, 1), steps(0, data=0.2), steps(1, data=0.2)), "input_bound")
    assert found.ranks == (0, 1) and "68%" in found.title and "200.0 ms of 295.0 ms" in found.evidence


def test_data_that_are_slow_at_first_only_are_no_finding():
    assert names(fold(spec(), start(0, 1), *(steps(rank, 2, data=5.0) + steps(rank, 10, first=3) for rank in (0, 1)))) == []
    assert names(fold(spec(), start(0, 1), *(steps(rank, 7, data=0.2) for rank in (0, 1)))) == []  # too few to judge by


@pytest.mark.parametrize(("phase", "way_out"), [("other", "logging"), ("forward", "device or core"), ("optimizer", "device or core")])
def test_a_rank_that_the_others_wait_for(phase, way_out):
    others = [steps(rank, backward=0.25) for rank in (0, 2)]
    found = first(fold(spec(nproc=3), start(0, 1, 2), *others, steps(1, **{phase: 0.25})), "straggler")
    assert found.ranks == (1,) and f"in {phase}" in found.title and way_out in found.way_out and "the others' 50.0 ms" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [*steps(0), *steps(1, backward=0.3)],  # backward is where the others wait
        [*steps(0), *steps(1, forward=0.04)],
        [*steps(0, backward=0.9), *steps(1, backward=0.9, other=0.05)],  # slower, and little of the step
        [*steps(0, forward=0.9), *steps(1, forward=0.9, other=0.3)],  # much of the step, and little slower
        [*steps(0, 7), *steps(1, 7, other=0.3)],  # too few to judge by
        [*steps(0), *steps(1, other=0.3), *(traffic(rank, send=(4, 524288)) for rank in (0, 1))],  # stages, which are unlike
        [*steps(0, loss=None), *steps(1, other=0.3)],  # the same, before the first look at what is sent
    ],
)
def test_ranks_of_one_pace(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_a_run_of_one_rank_has_no_straggler():
    assert names(fold(spec("single", 1), start(0), steps(0, other=0.3))) == []


def test_communication_that_nothing_hides():
    found = first(fold(spec(), start(0, 1), timeline(0), timeline(1, exposed=0.06)), "communication_bound")
    assert found.ranks == (0, 1) and "50%" in found.title and "50%, 60%; most of it in all_reduce (gloo)" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [timeline(0), timeline(1, exposed=0.01)],  # one that is not held up
        [timeline(0), *start(1)],  # nothing known of the other
        [timeline(0, step=2), timeline(1, step=2)],  # the first steps order their buckets
        [timeline(0, op="recv"), timeline(1, op="recv")],  # the bubble of a pipeline
    ],
)
def test_communication_that_is_no_finding(events):
    assert names(fold(spec(), start(0, 1), events)) == []


def test_many_small_buckets():
    found = first(fold(spec(), start(0, 1), ddp(0, 1), traffic(0, all_reduce=(16, 4 * MIB))), "small_buckets")
    assert found.ranks == (0,) and "16 buckets of 256.0 KiB" in found.title and "4.0 MiB in all" in found.evidence


@pytest.mark.parametrize(
    "events",
    [
        [*ddp(0), traffic(0, all_reduce=(2, 4096))],
        [*ddp(0), traffic(0, all_reduce=(16, 64 * MIB))],
        [*ddp(0), traffic(0)],
        [traffic(0, all_reduce=(16, 4 * MIB))],
        [saw(0, "model", name="Sequential", units=0, parameters=9), traffic(0, all_reduce=(16, 4 * MIB))],  # tp's own all-reduces
    ],
)
def test_buckets_that_are_as_they_should_be(events):
    assert names(fold(spec(), start(0, 1), events)) == []


@pytest.mark.parametrize(("device", "cause"), [("cuda:0", "no work is queued"), ("cpu", "costs nothing")])
def test_a_value_read_in_every_step(device, cause):
    found = first(fold(spec(), start(0, device=device), saw(0, "item", calls=20, steps=20)), "synchronised")
    assert found.ranks == (0,) and "20 of 20 steps" in found.evidence and cause in found.cause
    assert names(fold(spec(), start(0), saw(0, "item", calls=1, steps=20))) == []


def test_fsdp_with_one_unit():
    wrapped = [saw(0, "model", name="FSDPSequential", units=units, parameters=1073536) for units in (1, 8)]
    found = first(fold(spec("fsdp2"), start(0, 1), wrapped[0]), "one_unit")
    assert found.ranks == (0,) and "1,073,536 parameters" in found.evidence and found.kind == "memory"
    assert names(fold(spec("fsdp2"), start(0, 1), wrapped[1])) == [] == names(fold(spec(), start(0, 1), ddp(0, 1)))


def test_a_peak_of_activations():
    found = first(fold(spec(), start(0, 1), memory(0, 50 * MIB), memory(1, 200 * MIB, activations=150 * MIB)), "activations")
    assert found.ranks == (1,) and "75%" in found.title and "150.0 MiB of 200.0 MiB, in step 2" in found.evidence
    assert names(fold(spec(), start(0), memory(0, 200 * MIB, activations=100 * MIB))) == []
    assert names(fold(spec(), start(0), memory(0, 20 * MIB, activations=18 * MIB))) == []  # nobody needs to save that


# ---- what was not seen


def test_a_part_of_the_probe_that_failed():
    lost = {"kind": "probe_error", "t": 3.0, "rank": 1, "part": "memory", "type": "KeyError", "message": "x"}
    found = first(fold(spec(), start(0, 1), lost), "not_watched")
    assert found.ranks == (1,) and "memory on rank 1" in found.title and found.evidence == "KeyError: x"


def test_a_rank_that_left_nothing():
    found = first(fold(spec(nproc=4), start(0, 1, 3), status("stopped")), "not_there")
    assert found.ranks == (2,) and "3 of 4 ranks" in found.evidence
    assert first(fold(spec(), status("finished")), "not_there").ranks == (0, 1)
    assert names(fold(spec(nproc=4), start(0), status("running"))) == []  # the others may yet come
    assert names(fold(spec(nproc=4), status("stopped"))) == []  # before any had begun


def test_events_that_break_off():
    whole, cut = [*start(0), *steps(0, 50), end(0)], [*start(1), *steps(1, 20)]
    found = first(fold(spec(), whole, cut, status("finished")), "cut_short")
    assert found.ranks == (1,) and "1: 20; the others: 50" in found.evidence
    for healthy in (status("running"), status("stopped"), [end(1), status("finished")]):
        assert names(fold(spec(), whole, cut, healthy)) == []


def followed(tmp_path, *ranks: int, break_off: int = 0, spoil: int = 0) -> RunState:
    """A folder of a finished run of three ranks, of which some are there, read as a face reads it."""
    folder = RunFolder.create("ddp-x3", tmp_path)
    RunFolder.write_json(folder.spec, spec(nproc=3)["spec"])
    RunFolder.write_json(folder.status, {"state": "finished", "started": 1.0, "ended": 900.0})
    for rank in ranks:
        writer = Writer(folder.events_of(rank), rank)
        for event in [*start(rank), *steps(rank, 30), end(rank)]:
            writer.write(event["kind"], **{name: value for name, value in event.items() if name not in ("kind", "rank")})
        writer.close()
    path = folder.events_of(1)
    if break_off:
        path.write_bytes(path.read_bytes()[:-break_off])
    if spoil:
        lines = path.read_bytes().split(b"\n")
        lines[5:5] = [b"{", b"\xff\xfe\x00", b"[]", b'{"kind":"step","t":1.0,"rank":1}'][:spoil]
        path.write_bytes(b"\n".join(lines))
    follower = Follower(folder)
    follower.poll()
    return follower.state


def test_a_whole_folder_has_no_finding(tmp_path):
    assert names(followed(tmp_path, 0, 1, 2)) == []


def test_a_folder_without_a_rank(tmp_path):
    state = followed(tmp_path, 0, 2)
    assert names(state) == ["not_there"] and findings(state)[0].ranks == (1,)


def test_a_folder_that_was_cut_short(tmp_path):
    state = followed(tmp_path, 0, 1, 2, break_off=600)
    assert names(state) == ["cut_short"] and findings(state)[0].ranks == (1,)


def test_a_folder_with_lines_that_are_no_events(tmp_path):
    state = followed(tmp_path, 0, 1, 2, spoil=4)
    assert names(state) == ["not_readable"] and findings(state)[0].title.startswith("4 of")


def test_an_empty_folder(tmp_path):
    assert first(followed(tmp_path), "not_there").ranks == (0, 1, 2)


# ---- whatever comes


def test_nothing_is_found_in_nothing():
    assert findings(RunState()) == [] == findings(fold(spec())) == findings(fold(script()))


def everything() -> list[dict]:
    """Events of every kind that a rule reads, in a run that failed while it hung."""
    return [
        spec(nproc=3, device="cuda", batch_size=64),
        *start(0, 1, 2, device="cuda:1"),
        {"kind": "system", "t": 1.0, "gpus": [{"index": 1, "memory_used": 15 << 30, "memory_total": 16 << 30}]},
        *steps(0, 8, data=0.2),
        *steps(1, 8, loss=math.nan),
        *(event for rank in (0, 1, 2) for event in [*ddp(rank), *batches(rank, "a"), loader(rank, 5 + rank), timeline(rank)]),
        epoch(0, 0, 0),
        epoch(0, 0, 0),
        saw(0, "item", calls=20, steps=20),
        saw(0, "save", path="model.pt", step=5),
        saw(1, "save", path="model.pt", step=5),
        activity(0, "evaluating"),
        activity(1, "training"),
        traffic(0, all_reduce=(16, 4 * MIB)),
        memory(0, 200 * MIB, activations=150 * MIB),
        waiting(0, op(), step=8, at=(129, "evaluate")),
        waiting(2, op("barrier", sizes=()), step=8),
        {"kind": "probe_error", "t": 3.0, "rank": 1, "part": "memory", "type": "KeyError", "message": "x"},
        error(1, CUDA_FULL, "OutOfMemoryError", owners={"activations": 9 << 30}, ops=[op()]),
        status("failed", rank1=1, rank2=-15),
    ]


def paths(value, at=()):
    """Every place inside of nested dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*at, name)
        yield from paths(one, (*at, name))


def changed(value, at, junk):
    """A copy with `junk` at one place, or with nothing there where it is Ellipsis."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(at) > 1:
        copy[at[0]] = changed(copy[at[0]], at[1:], junk)
    elif junk is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = junk
    return copy


def test_everything_at_once_is_read():
    found = names(fold(everything()))
    assert found[0] == "out_of_memory" and {"nan_loss", "same_samples", "one_file", "input_bound", "small_buckets"} <= set(found)
    assert "not_judged" not in found


@pytest.mark.parametrize("junk", [..., None, "", "x", -1, 1e308, [], {}, [[]], {"x": {}}, True], ids=repr)
def test_no_event_makes_the_diagnosis_raise(junk):
    events = everything()
    sorts = {(event["kind"], event.get("what")): number for number, event in enumerate(events)}
    for number in sorts.values():
        for at in paths(events[number]):
            if at[0] in ("kind", "phases", "comm", "marks"):
                continue  # without a kind it is no event, and spans are for the fold to refuse
            found = findings(fold(events[:number], changed(events[number], at, junk), events[number + 1 :]))
            json.dumps([one.to_json() for one in found])
            assert found, (events[number], at)


def test_what_could_not_be_judged_is_said_and_the_rest_stands():
    state = fold(spec(), start(0, 1), saw(0, "save", step=5), saw(0, "item", calls=20, steps=20))
    assert names(state) == ["synchronised", "not_judged"]
    found = findings(state)[-1]
    assert found.title.startswith("1 of") and "one_file (KeyError: 'path')" in found.evidence and found.kind == "unseen"


@pytest.mark.parametrize("missing", ["sizes", "ranks", "over", "op", "seq", "group"])
def test_a_wait_is_told_without_a_field_of_an_operation(missing):
    bare = {name: value for name, value in op().items() if name != missing}
    found = names(fold(spec(), start(0, 1), waiting(0, bare)))
    assert "hang" in found and "not_judged" not in found


def test_more_ranks_than_were_seen():
    state = fold(spec(nproc=64), start(0), steps(0), waiting(0, op(ranks=range(64)), step=12), batches(0, "a"))
    found = first(state, "hang")
    assert len(found.ranks) == 64 and "rank 63: has not begun" in found.evidence


# ---- the table


def test_every_fault_of_the_lab_has_a_rule_that_names_it():
    told = {name for name, *_ in test_an_error_that_says_what_it_is.pytestmark[0].args[1]}
    assert {fault.finding for fault in FAULTS.values()} <= told | {rule.__name__ for rule in RULES}
