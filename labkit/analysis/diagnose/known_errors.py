"""The table of errors that are recognised by their message, each with its cause and fix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """An error that is recognised by its message, which matches `pattern`."""

    name: str
    pattern: str
    title: str
    cause: str
    fix: str


KNOWN_ERRORS = (
    KnownError(
        "nodes_differ",
        r"^NodesDiffer: ",
        "the nodes of the run have different software",
        "the ranks of a run must agree on every collective, which different versions and scripts do not guarantee",
        "start the same command with the same script and environment on every node",
    ),
    KnownError(
        "unused_parameters",
        r"Expected to have finished reduction in the prior iteration",
        "DDP received no gradient for some parameters",
        "DDP expects a gradient for every parameter; some parameters took no part in the loss, so their bucket never "
        "completed",
        "use every parameter in forward, or set find_unused_parameters=True in DDP, which traverses the autograd "
        "graph in every step",
    ),
    KnownError(
        "shuffle_beside_sampler",
        r"sampler option is mutually exclusive with shuffle",
        "DataLoader got both a sampler and shuffle=True",
        "the sampler determines the order of the samples, so DataLoader rejects shuffle=True",
        "remove shuffle from DataLoader and shuffle in the sampler: DistributedSampler(dataset, shuffle=True)",
    ),
    KnownError(
        "port_taken",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the rendezvous port is already in use",
        "another job, or one that was never terminated, listens on the same port",
        "use torchrun --standalone, which picks a free port, or pass a different --master-port; `labkit runs` lists "
        "active runs",
    ),
    KnownError(
        "shared_memory",
        r"(?:out of|insufficient) shared memory|creating shared memory|(?:shared memory|</torch_|shm).*No space left on"
        r" device",
        "the shared memory (/dev/shm) is full",
        "NCCL and DataLoader workers pass data through /dev/shm, which often has only 64 MB in a container",
        "start the container with --shm-size=1g or --ipc=host, or use fewer DataLoader workers",
    ),
    KnownError(
        "disk_full",
        r"No space left on device|Disk quota exceeded|the disk that holds the run folder was full",
        "the disk is full",
        "the run writes events, logs, checkpoints and the script's own files; what it could not write is lost",
        "free space on that disk (`labkit clean` deletes recorded runs), or set LABKIT_RUNS to a folder on another "
        "disk",
    ),
    KnownError(
        "no_nccl",
        r"(?:Distributed package doesn't have NCCL|NCCL is not available|No backend type associated with device type"
        r" cuda)",
        "this PyTorch build has no NCCL",
        "NCCL supports NVIDIA GPUs on Linux; builds for Windows, macOS or CPU do not include it",
        "use the gloo backend (the lab's scripts do so without a GPU), or install a CUDA build of PyTorch on Linux",
    ),
    KnownError(
        "old_driver",
        r"driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is too old for this PyTorch build",
        "PyTorch was built for a newer CUDA version than the driver supports",
        "update the driver, or install a PyTorch build for the CUDA version that nvidia-smi shows; `labkit doctor` "
        "shows both versions",
    ),
    KnownError(
        "no_kernel",
        r"no kernel image is available",
        "this PyTorch build has no kernels for this GPU",
        "the PyTorch wheel was compiled for other compute capabilities than the GPU's",
        "install a PyTorch build whose torch.cuda.get_arch_list() includes the GPU's compute capability; `labkit "
        "doctor` compares them",
    ),
    KnownError(
        "forked_cuda",
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was initialized before the process was forked",
        "a forked process cannot use its parent's CUDA context",
        "start workers with the spawn method, and do not use a GPU before that (labkit's kernel never does)",
    ),
    KnownError(
        "no_such_gpu",
        r"invalid device ordinal",
        "the selected GPU does not exist",
        "more ranks run on this machine than it has GPUs, or CUDA_VISIBLE_DEVICES hides some",
        "start at most one rank per GPU (--nproc), and call torch.cuda.set_device(LOCAL_RANK) in each rank",
    ),
    KnownError(
        "collective_timeout",
        r"Watchdog caught collective operation timeout",
        "a collective reached NCCL's timeout",
        "some rank never called this collective, or called it later than the timeout (default: 10 minutes); the rank "
        "that reports the timeout is one that waited",
        "find the rank that is at a different line: run again with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and read the "
        "flight recorder's dump, or `py-spy dump` on each rank; raise timeout= of init_process_group only if the ranks "
        "really differ by that much",
    ),
    KnownError(
        "nccl",
        r"NCCL (?:error|Error)|ncclUnhandledCudaError|ncclSystemError|unhandled (?:system|cuda)"
        r" error|ncclInternalError",
        "NCCL failed",
        "a link between GPUs, a driver or a network interface failed; NCCL's own log names it",
        "run again with NCCL_DEBUG=INFO and read the first WARN line; NCCL_SOCKET_IFNAME selects the interface "
        "between machines",
    ),
)
NAMES = tuple(known.name for known in KNOWN_ERRORS)
