"""How jobs end elsewhere, as their logs tell it: GPUs that fail, memory of the host, signals, launchers, restarts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from labkit.analysis.foreign import Page, opening

TRACEBACK = "Traceback (most recent call last):\n"
WHAT = (
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43:\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5e in libc10.so)\n"
)
OF_TORCHRUN = TRACEBACK + '  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'


def raised(error: str, line: int = 10, label: str = "") -> str:
    """A traceback that ends with an error."""
    return "".join(f"{label}{part}\n" for part in (TRACEBACK[:-1], f'  File "/w/a.py", line {line}, in go', error))


def of_rank(rank: int, error: str, line: int = 10) -> str:
    return raised(error, line, f"[rank{rank}]: ")


def died(rank: int, error: str, group: str = "PG ID 0 PG GUID 0(default_pg) ", second: int = 46) -> str:
    """What the watchdog of a rank writes before it aborts the process, and what the runtime of C++ adds."""
    says = f"[{group}Rank {rank}] Process group watchdog thread terminated with exception: {error}\n{WHAT}"
    first = f"[rank{rank}]:[E314 14:33:{second}.588302933 ProcessGroupNCCL.cpp:1595] {says}"
    return f"{first}\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {says}"


def timed_out(rank: int, prefix: str = "[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] ") -> str:
    """A timeout as torch before 2.5 writes it: without the process group."""
    return prefix.format(rank=rank) + (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE,"
        " NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    )


def progress(rank: int, enqueued: int, at: int = 1580) -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.465092152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {rank}] Exception (either an"
        f" error or timeout) detected by watchdog at work: {at}, last enqueued NCCL work: {enqueued}, last completed"
        " NCCL work: 1579.\n"
    )


RECORDED = (
    "Traceback (most recent call last):\n"
    '    File "/x/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 355, in wrapper\n'
    "      return f(*args, **kwargs)\n"
    '    File "/w/train.py", line 188, in main\n      loss = model(batch)\n  ValueError: too small\n  '
)


def block(rank: int, code: int, says: str) -> str:
    """A failure in the list of torchrun."""
    return (
        f"[0]:\n  time      : 2026-03-14_14:33:5{rank % 8}\n  host      : n1\n  rank      : {rank} (local_rank:"
        f" {rank % 8})\n  exitcode  : {code} (pid: 12)\n  error_file: <N/A>\n  traceback : {says}\n"
    )


def summary(rank: int, code: int, says: str = "To enable traceback see: https://pytorch.org/docs") -> str:
    return (
        f"{OF_TORCHRUN}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "train.py FAILED\nFailures:\n  <NO_OTHER_FAILURES>\n--------\nRoot Cause (first observed failure):\n"
        f"{block(rank, code, says)}========\n"
    )


def page(folder: Path, text: str) -> Page:
    (folder / "job.log").write_text(text, encoding="utf-8")
    (found,) = opening.explain([folder / "job.log"])
    return found


def said(found: Page) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.name, finding.ranks) for finding in found.findings]


def steps(numbers: Iterable[int]) -> str:
    return "".join(f"step {number} loss 2.0\n" for number in numbers)


REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"
ABORTED = "terminate called without an active exception\n"
SIGABRT = "Signal 6 (SIGABRT) received by PID 12"
SENT = (
    "W0823 16:54:02.337000 139 torch/distributed/elastic/agent/server/api.py:688] Received Signals.SIGTERM death"
    " signal, shutting down workers\n"
)
STUCK = (
    "[rank{0}]:[F1127 12:20:00.000001 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank {0}]"
    " ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring.\n"
)
FAILED = (
    "ERROR:torch.distributed.elastic:failed (exitcode: {code}) local_rank: {local} (pid: 24905) of binary: python\n"
)
XID = "Mar  5 10:11:12 n3 kernel: NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python, {}\n"
KILLED = "[Tue Mar  5 10:11:12 2024] Memory cgroup out of memory: Killed process 8156 (python) total-vm:263168kB\n"
CANCELLED = "slurmstepd: error: *** {} ON n1 CANCELLED AT 2025-01-10T15:27:25 {} ***\n"
RAY = (
    f"{raised('ray.exceptions.RayTaskError(ActorDiedError): ray::main_task() (pid=104, ip=10.0.0.1)')}"
    '  File "/w/main.py", line 188, in main_task\n    trainer.init_workers()\n'
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tpid: 71876\n"
)
SPAWNED = (
    f"{raised('torch.multiprocessing.spawn.ProcessRaisedException: ', 71)}\n"
    f"-- Process 2 terminated with the following error:\n{raised('ValueError: bad batch', 33)}"
)
BUS_ERROR = (
    of_rank(1, "RuntimeError: DataLoader worker (pid 11) is killed by signal: Bus error. It is possible that")
    + "\n[rank1]: The above exception was the direct cause of the following exception:\n\n"
    + of_rank(1, "RuntimeError: DataLoader worker (pid(s) 11) exited unexpectedly")
)
DEEPSPEED = "[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['python', '-u', 'main.py', "
DEEPSPEED += "'--local_rank={}', '--data', 'x'] exits with return code = {}\n"
MPI = "mpirun detected that one or more processes exited. The first process to do so was:\n\n"
MPI += "  Process name: [[27863,1],3]\n  Exit code:    1\n"
ENDINGS = {
    "illegal access": (
        died(2, "CUDA error: an illegal memory access was encountered") + died(0, REMOTE, second=45),
        [("illegal_access", (2,))],
        "rank 2: a GPU kernel accessed memory that is not its own",
    ),
    "ECC": (
        died(12, "CUDA error: uncorrectable ECC error encountered", "PG 0 (default_pg) ") + summary(12, -6, SIGABRT),
        [("gpu_fault", (12,))],
        "rank 12: a GPU or its link failed",
    ),
    "timeout and SIGABRT": (
        timed_out(0) + died(0, "[Rank 0] Watchdog caught collective operation timeout") + summary(0, -6, SIGABRT),
        [("collective_timeout", (0,))],
        "ALLREDUCE #1580 reached its timeout on rank 0",
    ),
    "timeout without group": (
        "".join(timed_out(rank) + progress(rank, 1582) for rank in (0, 1, 3)) + progress(2, 1579),
        [("collective_timeout", (2,))],
        "rank 2 did not call ALLREDUCE #1580, in which the others waited",
    ),
    "timeout of torch 2.1": (
        "".join(timed_out(rank, "[E ProcessGroupNCCL.cpp:475] ") for rank in (0, 1, 2, 4)),
        [("collective_timeout", (3,))],
        "ALLREDUCE #1580 reached its timeout on ranks 0, 1, 2, 4; rank 3 did not report it",
    ),
    "heartbeat": (
        STUCK.format(0) + STUCK.format(1),
        [("watchdog_blocked", (0, 1))],
        "NCCL's watchdog was blocked for 480 s on ranks 0, 1",
    ),
    "SIGTERM": (
        steps((1,)) + SENT + OF_TORCHRUN + "torch.distributed.elastic.SignalException: Process 62 got signal: 15\n",
        [("stopped_by_scheduler", ())],
        "the job was stopped from outside: torchrun received SIGTERM",
    ),
    "SIGHUP": (
        OF_TORCHRUN + "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4000 got signal: 1\n",
        [("stopped_by_scheduler", ())],
        "the job was stopped from outside: torchrun received SIGHUP",
    ),
    "DeepSpeed": (DEEPSPEED.format(1, -9), [("killed", (1,))], "rank 1 was killed (SIGKILL)"),
    "Lightning": (
        "[rank: 1] Child process with PID 42 terminated with code 1. Forcefully terminating all other processes\n",
        [("first_failure", (1,))],
        "rank 1 failed: exit code 1",
    ),
    "torchrun without a list": (FAILED.format(code=-9, local=4), [("killed", (4,))], "rank 4 was killed (SIGKILL)"),
    "no labels": (
        raised("ValueError: bad batch")
        + raised("RuntimeError: Connection closed by peer [10.0.0.2]:1")
        + summary(3, 1),
        [("first_failure", (3,))],
        "rank 3 failed: ValueError: bad batch (a.py:10 in go)",
    ),
    "a crash without label": (
        "Fatal Python error: Segmentation fault\n" + FAILED.format(code=-11, local=1),
        [("crashed", (1,))],
        "rank 1 crashed: Segmentation fault",
    ),
    "aborted at exit": (
        steps((1, 2)) + ABORTED + FAILED.format(code=-6, local=1) + summary(1, -6, SIGABRT),
        [("aborted_at_exit", (1,))],
        "rank 1: the C++ runtime aborted the process, as can happen after a complete training",
    ),
    "aborted at exit, with its stack": (
        ABORTED + "Fatal Python error: Aborted\n\nThread 0x00007faf3102eb80 (most recent call first):\n"
        "  <no Python frame>\n" + summary(1, -6, SIGABRT),
        [("aborted_at_exit", (1,))],
        "rank 1: the C++ runtime aborted the process, as can happen after a complete training",
    ),
    "aborted after an error": (
        of_rank(1, "KeyError: 1") + ABORTED + summary(1, -6, SIGABRT),
        [("first_failure", (1,))],
        "rank 1 failed first: KeyError: 1 (a.py:10 in go)",
    ),
    "aborted beside a rank that failed": (
        of_rank(0, "KeyError: 1") + ABORTED + summary(0, 1) + FAILED.format(code=-6, local=1),
        [("first_failure", (0,))],
        "rank 0 failed first: KeyError: 1 (a.py:10 in go); 1 other failed afterwards",
    ),
    "UCX": (
        "[exp-worker-0:2121 :0:7025] Caught signal 7 (Bus error: nonexistent physical address)\n"
        + DEEPSPEED.format(7, -7),
        [("crashed", (7,))],
        "rank 7 crashed: Bus error",
    ),
    "spawn": (SPAWNED, [("first_failure", (2,))], "rank 2 failed: ValueError: bad batch (a.py:33 in go)"),
    "spawn, killed": (
        raised("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL"),
        [("killed", (0,))],
        "rank 0 was killed (SIGKILL) (a.py:10 in go)",
    ),
    "mpirun": (MPI, [("first_failure", (3,))], "rank 3 failed: exit code 1"),
    "Ray": (RAY, [("ray_worker_died", ())], "job.log: a worker process of Ray ended without an exception"),
    "Ray, memory": (
        "(Controller pid=9) ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n",
        [("ray_memory", ())],
        "Controller pid=9: the memory of the host ran out, and Ray killed a worker",
    ),
    "Xid": (
        XID.format(13, "Graphics Exception") + XID.format(79, "GPU has fallen off the bus."),
        [("gpu_fault", ())],
        "the GPU 0000:3b:00 failed: it has fallen off the bus (Xid 79)",
    ),
    "Xid and its error": (
        XID.format(48, "DBE (double bit error)") + of_rank(3, "RuntimeError: CUDA error: uncorrectable ECC error"),
        [("gpu_fault", ())],
        "the GPU 0000:3b:00 failed: an uncorrectable error of its memory (ECC) (Xid 48)",
    ),
    "Xid and what follows": (
        XID.format(79, "GPU has fallen off the bus.")
        + of_rank(3, "RuntimeError: CUDA error: unspecified launch failure"),
        [("gpu_fault", ())],
        "the GPU 0000:3b:00 failed: it has fallen off the bus (Xid 79)",
    ),
    "memory of the host": (KILLED, [("out_of_memory", ())], "the memory of the host ran out, and the kernel killed"),
    "memory of the host, of a rank": (
        KILLED + summary(3, -9, "Signal 9 (SIGKILL) received by PID 12"),
        [("out_of_memory", (3,))],
        "the memory of the host ran out, and the kernel killed rank 3",
    ),
    "shared memory": (BUS_ERROR, [("shared_memory", (1,))], "rank 1: the shared memory (/dev/shm) is full"),
    "requeued": (
        CANCELLED.format("JOB 608", "DUE TO JOB REQUEUE") + "srun: error: n1: tasks 2-3: Exited with exit code 1\n",
        [("stopped_by_scheduler", ())],
        "the job was stopped and queued again",
    ),
    "signal of Slurm": (
        CANCELLED.format("STEP 1.0", "DUE to SIGNAL Terminated") + "srun: error: n1: tasks 0-1: Terminated\n",
        [("stopped_by_scheduler", ())],
        "Slurm cancelled the job: signal terminated",
    ),
    "failed task": (
        raised("KeyError: 1", label="1: ")
        + "srun: error: n1: task 1: Exited with exit code 1\n"
        + CANCELLED.format("STEP 1.0", "DUE TO TASK FAILURE"),
        [("first_failure", (1,))],
        "rank 1 failed: KeyError: 1",
    ),
    "failed node": (
        "srun: error: Node failure on n7\n" + CANCELLED.format("STEP 1.0", "DUE TO NODE FAILURE, SEE SLURMCTLD LOG"),
        [("stopped_by_scheduler", ())],
        "a node of the job failed (n7, ",
    ),
    "preempted pod": (
        "step 1 loss 2.0\n2m  Warning  Preempted  pod/ddp-0  Preempted by pod 12 on node gpu-3\n",
        [("stopped_by_scheduler", ())],
        "Kubernetes ended a pod",
    ),
    "exit code 137": (
        "    State:  Terminated\n      Reason:       Error\n      Exit Code:    137\n",
        [("killed", ())],
        "a container was killed (SIGKILL, exit code 137)",
    ),
    "mismatch": (
        of_rank(0, "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: A"),
        [("collective_mismatch", (0,))],
        "rank 0: the ranks called different collectives",
    ),
    "gloo": (
        of_rank(0, "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
        [("collective_timeout", (0,))],
        "rank 0: a collective of gloo reached its timeout",
    ),
    "aborted": (
        of_rank(0, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.")
        + summary(1, -9, "Signal 9 (SIGKILL) received by PID 12"),
        [("killed", (1,))],
        "rank 1 was killed (SIGKILL); 1 other failed afterwards",
    ),
    "at exit": (
        of_rank(1, "KeyError: 1")
        + "[rank1]: Exception ignored in atexit callback: <function clean at 0x7>\n"
        + of_rank(1, "OSError: [Errno 9] Bad file descriptor", 99),
        [("first_failure", (1,))],
        "rank 1 failed: KeyError: 1 (a.py:10 in go)",
    ),
    "hosts of pdsh": (
        raised("KeyError: 1", label="worker-1: [rank9]: ")
        + raised("ValueError: broken pipe", label="worker-0: [rank1]: "),
        [("first_failure", (9,))],
        "rank 9 failed first: KeyError: 1 (a.py:10 in go); 1 other failed afterwards",
    ),
    "a logger's lines": (
        raised("KeyError: 1", label="ERROR 03-05 10:11:13,123 worker.py:99] "),
        [("first_failure", ())],
        "job.log failed: KeyError: 1 (a.py:10 in go)",
    ),
    "two ranks in one line": (
        "[rank0]: Traceback (most recent call last):[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/a.py", line 5, in go\n[rank0]:   File "/w/a.py", line 3, in go\n'
        "[rank1]: KeyError: 'x'[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:1\n",
        [("first_failure", (1,))],
        "rank 1 failed first: KeyError: 'x' (a.py:5 in go); 1 other failed afterwards",
    ),
    **{
        f"time {stamp}": (
            raised("KeyError: 1", label=f"{stamp} [rank1]: "),
            [("first_failure", (1,))],
            "rank 1 failed: KeyError: 1 (a.py:10 in go)",
        )
        for stamp in (
            "10:00:01.123",
            "[2026-03-01 10:00:01,123]",
            "2026/03/01 10:00:01",
            "Nov 28 10:00:01 n3 python[12]:",
        )
    },
    "a time is no task of srun": (
        raised("KeyError: 1", label="10:00:01 "),
        [("first_failure", ())],
        "job.log failed: KeyError: 1 (a.py:10 in go)",
    ),
    "killed by srun": (
        "srun: error: n1: task 1: Exited with exit code 1\nsrun: Terminating StepId=1.0\n"
        "srun: error: n1: tasks 0,2-3: Killed\n",
        [("first_failure", (1,))],
        "rank 1 failed first: exit code 1; 3 others failed afterwards",
    ),
    "clients": (
        of_rank(
            0, "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."
        ),
        [("peers_missing", (0,))],
        "rank 0: not all ranks arrived at the rendezvous",
    ),
    "name": (
        of_rank(1, "ValueError: host not found: Name or service not known"),
        [("name_not_resolved", (1,))],
        "rank 1: the name of a host cannot be resolved",
    ),
    "closed": (
        OF_TORCHRUN + "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n",
        [("rendezvous_closed", ())],
        "job.log: the node came to a rendezvous that had already closed",
    ),
    "Lightning, unused": (
        of_rank(
            0,
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss",
        ),
        [("unused_parameters", (0,))],
        "rank 0: DDP received no gradient for some parameters",
    ),
    "transformers, NaN": (
        "{'loss': 2.1, 'grad_norm': 1.2}\n{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-5}\n",
        [("nan_loss", ())],
        "the loss is 0.0 with a grad_norm of nan in line 2 of job.log",
    ),
    "the list of torchrun with tracebacks": (
        summary(5, 1, RECORDED).replace("  <NO_OTHER_FAILURES>", block(1, 1, RECORDED.replace("188", "201"))),
        [("first_failure", (1, 5))],
        "all 2 ranks failed in the same way: ValueError: too small (train.py:188 in main)",
    ),
    "SIGTERM of a rank": (
        summary(5, -15, "Signal 15 (SIGTERM) received by PID 12"),
        [("stopped", (5,))],
        "rank 5 was ended (SIGTERM)",
    ),
    "heartbeat monitor": (
        "[rank1]:[E1127 12:20:00.000001 ProcessGroupNCCL.cpp:1413] [PG ID 0 PG GUID 0(default_pg) Rank 1] Heartbeat"
        " monitor timed out! Process will be terminated after dumping debug info.\n",
        [("watchdog_blocked", (1,))],
        "NCCL's watchdog was blocked on rank 1",
    ),
    "dump signal": (
        timed_out(2)
        + "".join(
            f"[rank{rank}]:[E1127 12:20:00.01 ProcessGroupNCCL.cpp:1375] [PG ID 0 PG GUID 0(default_pg) Rank"
            f" {rank}] Received a dump signal due to a collective timeout from rank 2 and we will try our best to"
            " dump the debug info. Last enqueued NCCL work: 1579, last completed NCCL work: 1578.This is most likely\n"
            for rank in (0, 1)
        )
        + progress(2, 1580).replace("[PG 1 Rank", "[PG ID 0 PG GUID 0(default_pg) Rank"),
        [("collective_timeout", (0, 1))],
        "ranks 0, 1 did not call ALLREDUCE #1580, in which the others waited",
    ),
    "line of the collective": (
        timed_out(0) + "[rank0]:[E321 02:07:08.40 ProcessGroupNCCL.cpp:730] Stack trace of the failed collective: \n"
        "#0 all_reduce from /x/site-packages/torch/distributed/distributed_c10d.py:2789\n"
        "#1 train from /w/train.py:57\n",
        [("collective_timeout", (0,))],
        "ALLREDUCE #1580 (train.py:57) reached its timeout on rank 0",
    ),
    "usage": (
        "usage: torchrun [-h]\ntorchrun: error: unrecognized arguments: --nproc-per-nod=4\n",
        [("first_failure", ())],
        "job.log failed: usage error: unrecognized arguments: --nproc-per-nod=4",
    ),
    "after Slurm stopped it": (
        CANCELLED.format("JOB 608", "DUE TO PREEMPTION") + raised("KeyboardInterrupt", label="0: "),
        [("stopped_by_scheduler", ())],
        "the job was preempted",
    ),
    "an error at the end": (
        of_rank(0, "torch.OutOfMemoryError: CUDA out of memory.")
        + of_rank(0, "BrokenPipeError: [Errno 32] Broken pipe"),
        [("out_of_memory", (0,))],
        "rank 0: a device ran out of memory",
    ),
    "an error while handling": (
        of_rank(0, "torch.OutOfMemoryError: CUDA out of memory.")
        + "\n[rank0]: During handling of the above exception, another exception occurred:\n\n"
        + of_rank(
            0, "torch.distributed.DistBackendError: NCCL error in: x.cpp:3353, remote process exited or there was", 99
        ),
        [("out_of_memory", (0,))],
        "rank 0: a device ran out of memory (a.py:10 in go)",
    ),
    "Ray, repeated": (
        raised("KeyError: 1 [repeated 3x across cluster] (Ray deduplicates logs)", label="(W pid=100, ip=10.0.0.2) "),
        [("first_failure", ())],
        "W pid=100 failed: KeyError: 1 (a.py:10 in go)",
    ),
    "Docker, killed": (
        "trainer-1  | step 1 loss 2\ntrainer-1 exited with code 137\n",
        [("killed", ())],
        "a container was killed (SIGKILL, exit code 137)",
    ),
    "Ctrl+C": (raised("KeyboardInterrupt"), [("interrupted", ())], "job.log was interrupted (Ctrl+C) (a.py:10 in go)"),
    "handled": (steps((1,)) + raised("ConnectionError: no route") + steps((2, 3, 4)), [], ""),
}


@pytest.mark.parametrize(("text", "names", "title"), ENDINGS.values(), ids=ENDINGS)
def test_how_a_job_ended(text, names, title, tmp_path):
    found = page(tmp_path, text)
    assert said(found) == names
    assert not title or found.findings[0].title.startswith(title)
    assert bool(names) != any("No error" in note for note in found.notes)


def test_an_error_that_only_reports_a_peer_is_no_cause(tmp_path):
    (finding,) = page(tmp_path, of_rank(0, "RuntimeError: Connection closed by peer [10.0.0.2]:1")).findings
    assert "lost the connection to another rank" in finding.cause and "logs of the other ranks" in finding.fix


def test_the_evidence_has_the_last_error_of_nccl(tmp_path):
    raised = "torch.distributed.DistBackendError: NCCL error in: x.cpp:3353, unhandled cuda error, NCCL version 2.21.5"
    more = "".join(
        f"[rank0]: {line}\n" for line in ("ncclUnhandledCudaError: Call failed.", "Last error:", "Cuda failure 1")
    )
    (finding,) = page(tmp_path, of_rank(0, raised) + more).findings
    assert finding.name == "nccl" and finding.evidence.endswith("NCCL version 2.21.5 Cuda failure 1")


def test_restarts_of_torchrun_in_one_log(tmp_path):
    """An earlier attempt does not end the job; the note says what it ended with."""
    restart = (
        "I0823 16:50:03.337000 139 api.py:875] [default] Worker group FAILED. {}/3 attempts left; will restart worker"
    )
    restart += " group\n"
    first = FAILED.format(code=1, local=1) + restart.format(3)
    found = page(tmp_path, of_rank(1, "RuntimeError: storage") + first + steps((1, 2)))
    assert not found.findings
    assert found.notes[0] == (
        "torchrun started the ranks 2 times; this is about the last attempt; the one before ended with rank 1:"
        " RuntimeError: storage."
    )
    found = page(tmp_path, of_rank(1, "RuntimeError: storage") + first + of_rank(0, "KeyError: 1"))
    assert said(found) == [("first_failure", (0,))]


def test_the_times_of_torch_have_months_without_a_zero(tmp_path):
    found = page(tmp_path, died(2, "CUDA error: an illegal memory access was encountered"))
    assert [row[2] for row in found.tables[-1].rows if row[0] == "rank 2"] == ["14:33:46"]


def test_the_rank_that_stopped_first_in_a_log_without_error(tmp_path):
    lines = [
        f"[rank{rank}]: step {step} loss 2.0\n" for step in range(1, 6) for rank in range(4) if rank != 2 or step < 4
    ]
    found = page(tmp_path, "".join(lines))
    assert not found.findings
    assert found.notes[0] == "rank 2 told of step 3 last, others of step 5: look there first if the job hung."
