"""Short runs for the tests of the findings, and error messages of torch, gloo and NCCL."""

from __future__ import annotations

from folded import fold

from labkit.analysis.diagnose import findings
from labkit.plan.spec import Spec
from labkit.record.state import RunState

__all__ = ["fold"]

SITE = "/home/ann/.venv/lib/python3.11/site-packages/torch/distributed"
MIB = 1 << 20

# Messages of torch 2.13, gloo and NCCL, verbatim except for numbers.
GONE = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2747: Connection"
    " reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of"
    " the remote worker before reporting an error. GLHF! 🏖️"
)
CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    " [127.0.0.1]:38279. This is typically caused by a remote worker crashing. Check the logs of the remote worker"
    " before reporting an error. GLHF! 🏖️"
)
UNLIKE = (
    "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <="
    " op.nbytes. 1024 vs 1000. Received data size doesn't match expected size. Is there a distributed collective"
    " mismatch in your code?"
)
DETAIL = (
    "Detected mismatch between collectives on ranks. Rank 1 is running collective:"
    " CollectiveFingerPrint(SequenceNumber=10, OpType=BARRIER), but Rank 0 is running collective:"
    " CollectiveFingerPrint(SequenceNumber=10, OpType=ALLREDUCE, TensorShape=[405898], TensorDtypes=Float,"
    " TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))."
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}\nLast error:\n{}"
)
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
    "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 9637888), error: No space left on device"
    " (28)",
)
NCCL_FULL = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Failed to CUDA calloc async 608 bytes: Cuda failure 2 'out of memory'",
)
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog"
    " caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
)
UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that"
    " your module has parameters that were not used in producing loss. You can enable unused parameter detection by"
    " passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`"
)
PORT = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name:"
    " EADDRINUSE, message: address already in use"
)
CPU_FULL = (
    "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 1125899906842624 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 16.00 GiB of which 1.00 GiB is free."
    " Including non-PyTorch memory, this process has 15.00 GiB memory in use. Of the allocated memory 14.00 GiB is"
    " allocated by PyTorch"
)


# ---- short constructors of events


def spec(strategy: str = "ddp", nproc: int = 2, **asked) -> dict:
    asked = {"workload": "cnn", "steps": 100, "device": "cpu"} | asked
    return {"kind": "spec", "spec": Spec(strategy=strategy, nproc=nproc, **asked).to_json()}


def script(nproc: int = 2) -> dict:
    return {"kind": "spec", "spec": {"script": "train.py", "nproc": nproc}}


def status(state: str, **failures) -> dict:
    """`rank1=-9`: torchrun reported that rank 1 died with this exit code."""
    names = {-6: "SIGABRT", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM"}
    codes = {
        name.removeprefix("rank"): code if isinstance(code, tuple) else (code, "") for name, code in failures.items()
    }
    failed = {
        name: {"exit_code": code, "signal": names.get(code), "t": 9e9, "message": said}
        for name, (code, said) in codes.items()
    }
    return {"kind": "status", "status": {"state": state, "failures": failed}}


def start(*ranks: int, **fields) -> list[dict]:
    return [
        {"kind": "start", "t": 0.0, "rank": rank, "pid": 100 + rank, "host": "here", "device": "cpu"} | fields
        for rank in ranks
    ]


def saw(rank: int, what: str, **fields) -> dict:
    return {"kind": "saw", "t": 1.0, "rank": rank, "what": what} | fields


def activity(rank: int, name: str) -> dict:
    return {"kind": "activity", "t": 1.0, "rank": rank, "name": name}


def end(rank: int, code: int = 0) -> dict:
    return {"kind": "end", "t": 900.0, "rank": rank, "exit_code": code}


def stack(line: int, function: str) -> str:
    """A recorded stack: the line of the script, and the library call in it."""
    return (
        f'  File "/runs/one/train.py", line {line}, in {function}\n    …\n  File "{SITE}/c10d_logger.py", line 83, in'
        " wrapper\n    …"
    )


def error(
    rank: int, message: str, type: str = "RuntimeError", t: float = 500.0, at=(113, "train_step"), **fields
) -> dict:
    told = (
        {"type": type, "message": message, "traceback": f"Traceback:\n{stack(*at)}\n{type}: {message}"}
        if at
        else {"type": type}
    )
    return {"kind": "error", "t": t, "rank": rank, "ops": []} | told | fields


def op(
    name: str = "all_reduce",
    seq: int = 10,
    sizes=((405898,),),
    over: bool = False,
    ranks=(0, 1),
    group: str = "default_pg",
) -> dict:
    return {
        "op": name,
        "group": group,
        "ranks": list(ranks),
        "seq": seq,
        "sizes": [list(size) for size in sizes],
        "over": over,
    }


def message(name: str, peer: int, tag: int = 0) -> dict:
    """A send to, or a receive from, another rank."""
    return {"op": name, "group": "default_pg", "id": "0", "peer": peer, "tag": tag, "sizes": [[4]]}


def called(rank: int, *calls: tuple, begin: int = 1, ops=(), **fields) -> dict:
    """The collectives of a rank: (op, size, dtype, whether another thread called), or less of these."""
    kinds = [_kind(*call) for call in calls]
    group = {"group": "default_pg", "id": "0", "ranks": [0, 1, 2], "first": begin, "kinds": kinds}
    group["calls"] = list(range(len(kinds)))
    return waiting(rank, *ops, **fields) | {"kind": "called", "groups": [group]}


def _kind(op: str, size: int = 4, dtype: str = "Float", thread: bool = False) -> dict:
    return {"op": op, "sizes": [[size]], "dtypes": [dtype], "thread": thread}


def waiting(rank: int, *ops: dict, computed=0.0, at=(113, "train_step"), step: int = 4, **fields) -> dict:
    told = {
        "since": 100.0,
        "step": step,
        "phase": "backward",
        "computed": computed,
        "stack": stack(*at),
        "ops": list(ops),
    }
    return {"kind": "waiting", "t": 142.0, "rank": rank, "activity": "training"} | told | fields


def steps(rank: int, count: int = 12, first: int = 1, loss=1.0, **seconds) -> list[dict]:
    """Steps of 100 ms; `seconds` sets the duration of single phases."""
    usual = {"data": 0.005, "copy": 0.0, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.005} | seconds
    whole = {"step": max(0.1, sum(usual.values()))} | usual
    numbers = range(first, first + count)
    told = [
        {"kind": "step", "t": 10 + number / 10, "rank": rank, "step": number, "samples": 8, "seconds": whole}
        for number in numbers
    ]
    return [event | {"loss": loss(event["step"]) if callable(loss) else loss} for event in told]


def timeline(rank: int, step: int = 50, exposed: float = 0.05, op: str = "all_reduce") -> dict:
    comm = [[op, 0.04, 0.04 + exposed, 1605632, "default_pg", [0, 1], 57]]
    told = {
        "t0": 15.0,
        "seconds": 0.1,
        "device": "cpu",
        "backend": "gloo",
        "phases": [["backward", 0.0, 0.1]],
        "comm": comm,
    }
    return {
        "kind": "timeline",
        "t": 16.0,
        "rank": rank,
        "step": step,
        "busy": [],
        "marks": [],
        "exposed": {"backward": exposed},
    } | told


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


def tracked(rank: int, ranks=None, **model) -> dict:
    """The tensors that looks have sums of: the weight and the bias of one layer."""
    tensors = [[0, "weight", "parameter", [3, 2]], [0, "bias", "parameter", [3]]]
    return {"kind": "tracked", "t": 1.0, "rank": rank, "models": [{"name": "Net", "ranks": ranks} | model]} | {
        "tensors": tensors
    }


def looks(rank: int, at=(0, 1, 2, 3, 4, 6, 8), part: float = 0.0, **fields) -> list[dict]:
    """Looks after some steps, at replicas that are equal, or differ by `part` after the start; a field may be a
    function of the step, and is left out where it is None."""
    told = []
    for step in at:
        sums = [[1.0 + step, 2.0 + step], [0.5 + step + (part if step else 0), 1.0 + step + (part if step else 0)]]
        values = {name: value(step) if callable(value) else value for name, value in fields.items()} if step else {}
        given = {name: value for name, value in values.items() if value is not None}
        told.append({"kind": "look", "t": 2.0 + step, "rank": rank, "step": step, "sums": sums, "group": 2} | given)
        told[-1]["gradients"] = bool(step)
    return told


def memory(rank: int, peak: int, **at_peak: int) -> dict:
    told = {"step": 2, "t0": 1.0, "seconds": 0.1, "phases": [], "times": [0.0], "owners": {"activations": [0]}}
    return {"kind": "memory_step", "t": 2.0, "rank": rank, "peak": peak, "at_peak": at_peak} | told


def names(state: RunState) -> list[str]:
    return [finding.name for finding in findings(state)]


def first(state: RunState, name: str):
    """The first finding, which must have this name."""
    found = findings(state)
    assert found and found[0].name == name, [one.name for one in found]
    assert found[0].title and found[0].evidence and found[0].cause and found[0].fix
    return found[0]
