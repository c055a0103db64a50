"""Logs of jobs that ran anywhere: who failed first and with what, who waited for whom, and how NCCL connects ranks."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import labkit
from labkit.analysis.foreign import ForeignError, Page, opening
from labkit.analysis.foreign.log_lines import step_in

MEGATRON = (
    " [2026-01-02 03:04:05] iteration      100/  500000 | consumed samples:  25600 | elapsed time per iteration (ms):"
    " 250.3 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: 2.345678E+00 | loss scale: 1.0 |"
)
STEPS = {  # lines of trainers, and what they say: step, loss, seconds
    MEGATRON: (100, 2.345678, 0.2503),
    "step: 10  loss:  7.1234  grad_norm:  1.2  memory: 30.10GiB(38.1%)  tps: 3,112  mfu: 40.1%": (10, 7.1234, None),
    "iter 1200: loss 2.3100, time 120.30ms, mfu 10.12%": (1200, 2.31, 0.1203),
    "steps: 100 loss: 2.3125 iter time (s): 0.250 samples/sec: 1024.0": (100, 2.3125, 0.25),
    "Epoch: [2][ 10/500]\tTime  0.310 ( 0.55)\tData  0.000\tLoss 6.9e+00 (7.0e+00)": (1010, 6.9, 0.31),
    "Step 1,000/5,000 - train_loss=0.125 - 4.0 it/s": (1000, 0.125, 0.25),
    "{'step': 30, 'loss': nan, 'learning_rate': 5e-05}": (30, None, None),
    "global_step=7 train/loss=-1.5 step_time=80 ms": (7, -1.5, 0.08),
    "step 5 loss inf 2.00s/it": (5, float("inf"), 2.0),
}
NO_STEPS = (
    "step 0: val loss 4.2",
    "step 100 eval_loss: 1.0 test loss 2.0",
    "loss 3.0",
    "step 100 of 200",
    "max_steps=1000 loss=1.0",
    "iteration 12.5 loss 1.0",
    "the loss of step one: 3",
    "step 100 time: 12.5 s",  # of all steps, perhaps
)

# The others print their errors however late they run: torchrun would end them with SIGTERM before, on a busy machine.
SCRIPT = """
import signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank(); signal.signal(signal.SIGTERM, signal.SIG_IGN)
def step(number):
    x = torch.ones(4)
    if rank == 2 and number == 3:
        x = x @ torch.ones(5, 3)
    dist.all_reduce(x)
for number in range(6):
    step(number)
    print(f"step {number} of rank {rank}", flush=True)
"""


@pytest.mark.parametrize(("line", "said"), STEPS.items(), ids=range(len(STEPS)))
def test_a_step_that_a_trainer_prints(line, said):
    step, loss, seconds = step_in(line)
    if said[1] is None:
        assert (step, seconds) == (said[0], said[2]) and math.isnan(loss)
    else:
        assert (step, loss, seconds) == pytest.approx(said) if said[2] else (step, loss, seconds) == said


@pytest.mark.parametrize("line", NO_STEPS)
def test_a_line_that_is_about_no_step_of_training(line):
    assert step_in(line) is None


def test_of_too_many_steps_the_curve_reaches_the_end_and_the_first_loss_without_value_is_exact(tmp_path, monkeypatch):
    for module in ("log_lines", "logs"):
        monkeypatch.setattr(f"labkit.analysis.foreign.{module}.MOST_STEPS", 100)
    lines = [f"step {number}: loss {'nan' if number >= 777 else 2.5}" for number in range(2000)]
    found = page(tmp_path, "\n".join(lines))
    steps = [row["step"] for row in found.figures["steps"][0]]
    assert len(steps) <= 100 and steps[0] == 0 and steps[-1] == 1999
    assert found.findings[0].title == "the loss becomes nan in step 777"
    assert "Of more than 100 steps of a rank, some are left out, most of them early ones." in found.notes


def test_a_log_with_bytes_of_another_encoding_is_read(tmp_path):
    path = tmp_path / "job.log"
    path.write_bytes("step 1: loss 2.5 für immer\n".encode("latin-1") * 5)
    assert opening.explain([path])[0].figures["steps"][0] == [{"step": 1, "loss": 2.5, "seconds": None}]
    path.write_bytes(b"\xe9" * 500)
    with pytest.raises(ForeignError, match="nothing that can be explained"):
        opening.explain([path])


def test_losses_and_times_of_a_log_are_told(tmp_path):
    lines = [
        f"2026-01-02 03:04:{second:02} step {step} loss {8 / step}" for step, second in ((10, 0), (20, 5), (40, 25))
    ]
    found = page(tmp_path, "\n".join([*lines, "2026-01-02 03:04:30 step 50 loss nan", "step 60 loss nan"]))
    told = found.figures["steps"][0]
    assert [step["seconds"] for step in told] == [None, 0.5, 1.0, 0.5, None]
    assert [step["loss"] for step in told] == [0.8, 0.4, 0.2, None, None]
    (table,) = [table for table in found.tables if table.title == "Training"]
    assert table.rows == (("the log", "10 to 60", "5", "0.8 to nan", "500 ms"),)
    (finding,) = found.findings
    assert finding.name == "nan_loss" and "in a step between 41 and 50" in finding.title


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> Path:
    """What a real torchrun leaves of three ranks of which rank 2 fails: `all.txt`, interleaved, and its `logs`."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--log-dir=logs", "--tee=3"]
    with (folder / "all.txt").open("wb") as out:
        done = subprocess.run(
            [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py"],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 1
    return folder


def page(folder: Path, *texts: str, **named: str) -> Page:
    """The page about some logs."""
    folder.mkdir(exist_ok=True)
    files = {f"{number}.log": text for number, text in enumerate(texts)}
    files |= {name.replace("__", "/"): text for name, text in named.items()}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (found,) = opening.explain([folder / name for name in files])
    return found


def names(found: Page) -> list[str]:
    return [finding.name for finding in found.findings]


# ---- torchrun


@pytest.mark.parametrize("what", ["all.txt", "logs"])
def test_the_rank_that_failed_first_in_what_torchrun_writes(failed, what):
    (found,) = labkit.explain(failed / what).pages
    (first,) = found.findings
    assert (first.name, first.ranks) == ("first_failure", (2,))
    assert first.title == (
        "rank 2 failed first: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 5x3)"
        " (train.py:8 in step); 2 others failed afterwards"
    )
    failures = {failure["rank"]: failure for failure in found.figures["failures"]}
    assert {rank: failure["at"] for rank, failure in failures.items()} == {
        2: "train.py:8 in step",
        0: "train.py:9 in step",
        1: "train.py:9 in step",
    }
    assert [failures[rank]["consequence"] for rank in range(3)] == [True, True, False]
    assert failures[2]["exit_code"] == (1 if what == "all.txt" else None)
    last = {who: line for who, _, _, line in found.tables[-1].rows}
    assert {"rank 0", "rank 1", "rank 2"} <= set(last)


def test_a_known_error_has_its_cause_and_fix(tmp_path):
    found = page(
        tmp_path,
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/me/train.py", line 88, in step\n'
        "[rank1]:     loss.backward()\n"
        "[rank0]: epoch 3\n"
        "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.\n"
        "[rank1]: Parameter indices which did not receive grad for rank 1: 2 3\n"
        "\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/me/train.py", line 80, in step\n'
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5000\n",
    )
    (finding,) = found.findings
    assert (finding.name, finding.ranks) == ("unused_parameters", (1,))
    assert finding.title == "rank 1: DDP received no gradient for some parameters (train.py:88 in step)"
    assert "did not receive grad for rank 1: 2 3" in finding.evidence


def test_who_failed_first_is_not_said_without_evidence(tmp_path):
    """Two ranks with errors of their own in two files without times: their order is not known."""
    failed = 'Traceback (most recent call last):\n  File "/x/a.py", line 4, in go\n{error}\n'
    texts = {"rank_0.log": failed.format(error="KeyError: 1"), "rank_1.log": failed.format(error="ValueError: 2")}
    (finding,) = page(tmp_path, **texts).findings
    assert finding.title == "rank 0 failed: KeyError: 1 (a.py:4 in go); 1 other failed too"
    assert "who failed first cannot be told" in finding.cause
    texts = {name: f"2026-03-01 10:00:0{5 - int(name[5])} step\n{text}" for name, text in texts.items()}
    (finding,) = page(tmp_path, **texts).findings
    assert finding.title == "rank 1 failed first: ValueError: 2 (a.py:4 in go); 1 other failed afterwards"


def test_of_a_chain_of_exceptions_the_last_counts(tmp_path):
    found = page(
        tmp_path,
        "Traceback (most recent call last):\n"
        '  File "/home/me/data.py", line 5, in read\n'
        "    rows[9]\n"
        "IndexError: list index out of range\n"
        "\n"
        "During handling of the above exception, another exception occurred:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in main\n'
        "    raise RuntimeError('shard 9 is damaged')\n"
        "RuntimeError: shard 9 is damaged\n"
        "done\n",
    )
    (failure,) = found.figures["failures"]
    said = failure["type"], failure["message"], failure["at"]
    assert said == ("RuntimeError", "shard 9 is damaged", "train.py:7 in main")


def test_only_torchrun_s_summary(tmp_path):
    """Without --tee and without tracebacks: the root cause, not the ranks that torchrun terminated, nor itself."""
    found = page(
        tmp_path,
        "Traceback (most recent call last):\n"
        '  File "/usr/bin/torchrun", line 8, in <module>\n'
        "    sys.exit(main())\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\n"
        "train.py FAILED\n"
        "------------------------------------------------------------\n"
        "Failures:\n"
        "[1]:\n"
        "  time      : 2026-03-01_10:00:02\n"
        "  host      : node0\n"
        "  rank      : 8 (local_rank: 0)\n"
        "  exitcode  : -15 (pid: 11)\n"
        "  error_file: <N/A>\n"
        "  traceback : Signal 15 (SIGTERM) received by PID 11\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  time      : 2026-03-01_10:00:01\n"
        "  host      : node0\n"
        "  rank      : 11 (local_rank: 3)\n"
        "  exitcode  : -9 (pid: 12)\n"
        "  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 12\n"
        "============================================================\n",
    )
    (finding,) = found.findings
    assert (finding.name, finding.ranks) == ("killed", (11,))
    assert "1 other failed afterwards" in finding.title
    assert [failure["exit_code"] for failure in found.figures["failures"]] == [-9, -15]


def test_the_error_file_of_torchrun_and_its_last_attempt(tmp_path):
    said = {"message": "ValueError: 3 is no size", "extraInfo": {"py_callstack": "", "timestamp": "1790000000"}}
    run = tmp_path / "logs" / "job_1"
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        folder = run / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("", encoding="utf-8")
        (folder / "stdout.log").write_text(f"attempt {attempt} of rank {rank}\n", encoding="utf-8")
    (run / "attempt_1" / "1" / "error.json").write_text(json.dumps({"message": said}), encoding="utf-8")
    (run / "attempt_0" / "0" / "error.json").write_text(json.dumps({"message": "KeyError: 'x'"}), encoding="utf-8")
    (found,) = opening.explain([tmp_path / "logs"])
    (finding,) = found.findings
    assert finding.title == "rank 1 failed: ValueError: 3 is no size"
    assert any("2 times" in note for note in found.notes)
    assert found.figures["failures"][0]["time"] == 1790000000


# ---- Slurm and Kubernetes

_LABELLED = "0: step 1\n1: step 1\n2: step 1\n3: step 1\n"
_CANCELLED = "slurmstepd-a1: error: *** JOB 3 ON a1 CANCELLED AT 2026-11-27T13:15:33{why} ***\n"
_ENDED = "srun: error: a1: tasks 0-1: Terminated\nsrun: error: a2: tasks 2-3: Terminated\n"


def test_slurm_ended_the_job(tmp_path):
    found = page(tmp_path, _LABELLED + _CANCELLED.format(why=" DUE TO TIME LIMIT") + _ENDED)
    (finding,) = found.findings
    assert finding.title == "the job reached its time limit (a1, 2026-11-27T13:15:33)"
    assert found.figures["ranks"] == [0, 1, 2, 3]
    (finding,) = page(tmp_path, _LABELLED + _CANCELLED.format(why="") + _ENDED).findings
    assert finding.title == "Slurm cancelled the job (a1, 2026-11-27T13:15:33)"


def test_a_task_of_slurm_failed(tmp_path):
    text = (
        _LABELLED + '1: Traceback (most recent call last):\n1:   File "/x/boom.py", line 6, in <module>\n'
        '1:     raise ValueError("bad sample 17")\n1: ValueError: bad sample 17\n'
        "srun: error: a1: task 1: Exited with exit code 1\n"
        "0: slurmstepd-a1: error: *** STEP 1.0 ON a1 CANCELLED AT 2026-11-27T13:14:03 ***\n"
        "srun: error: a1: task 0: Terminated\nsrun: error: a2: tasks 2-3: Terminated\n"
    )
    (finding,) = page(tmp_path, text).findings
    assert finding.ranks == (1,)
    assert finding.title.startswith("rank 1 failed first: ValueError: bad sample 17 (boom.py:6 in <module>)")
    (finding,) = page(tmp_path, "srun: error: a2: task 2: Killed\nsrun: Force Terminated StepId=2.0\n").findings
    assert (finding.name, finding.ranks) == ("killed", (2,))
    (finding,) = page(
        tmp_path, "step 1\n/var/spool/job00191/slurm_script: line 28:  8156 Killed  python main.py\n"
    ).findings
    assert finding.title == "0.log was killed (SIGKILL)"


def test_the_memory_of_the_host_ran_out(tmp_path):
    text = (
        _LABELLED + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM"
        " Killed.\nsrun: error: a1: task 1: Out Of Memory\n"
    )
    found = page(tmp_path, text)
    (finding,) = found.findings
    assert (finding.name, finding.ranks) == ("out_of_memory", (1,))
    assert finding.title == "the memory of the host ran out on a1, and the kernel killed rank 1"
    found = page(tmp_path, "step 1\n    Reason:       OOMKilled\n    Exit Code:    137\n")
    assert names(found) == ["out_of_memory"]


def test_pods_of_kubernetes(tmp_path):
    """Two pods with two ranks each: `[default1]` of which pod failed is told apart."""
    head = "[pod/llm-worker-{pod}/pytorch] 2026-03-01T10:00:0{second}.123456789Z "
    lines = []
    for pod in (0, 1):
        lines += [head.format(pod=pod, second=1) + f"[default{local}]:step 1" for local in (0, 1)]
    failed = head.format(pod=1, second=3) + "[default1]:[rank3]: "
    lines += [failed + "Traceback (most recent call last):", failed + '  File "/x/train.py", line 4, in go']
    lines += [failed + "KeyError: 'labels'", head.format(pod=0, second=4) + "[default0]:step 2"]
    found = page(tmp_path, "\n".join(lines))
    (finding,) = found.findings
    assert finding.title == "rank 3 failed: KeyError: 'labels' (train.py:4 in go)"
    who = {row[0]: row[2] for row in found.tables[-1].rows}
    assert who["local rank 0 of llm-worker-0"] == "10:00:04" and who["rank 3"] == "10:00:03"


_FAILED_IN_POD = """\
W1127 21:44:01.000000 21 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 30 \
closing signal SIGTERM
E1127 21:44:01.100000 21 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 1 \
(pid: 31) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_21:44:01
  host      : ddp-4f2a1c-node-0-1.ddp-4f2a1c
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 31)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def of_trainjob() -> list[list[str]]:
    """What the two pods of a TrainJob print, as Kubeflow's SDK returns it: without a prefix for the pod."""
    pods = [["Requirement already satisfied: torch"] for _ in range(2)]
    for node, lines in enumerate(pods):
        lines += [f"[default{local}]:step {step} of rank {2 * node + local}" for step in (1, 2) for local in (0, 1)]
    error = ["Traceback (most recent call last):", '  File "/job/train.py", line 12, in <module>', "    step(batch)"]
    error += ["RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."]
    pods[1] += [f"[default1]:[rank3]: {line}" for line in error] + _FAILED_IN_POD.splitlines()
    gone = ["Traceback (most recent call last):", '  File "/job/train.py", line 14, in <module>', "    loss.backward()"]
    gone += [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"
    ]
    pods[0] += [f"[default0]:[rank0]: {line}" for line in gone]
    return pods


@pytest.mark.parametrize("form", ["kubectl", "timestamps", "sdk", "one file per pod"])
def test_pods_of_a_trainjob(tmp_path, form):
    """`kubectl logs --prefix` interleaves the pods; the SDK's `get_job_logs` has one pod after the other."""
    pods = of_trainjob()
    if form == "sdk":
        found = page(tmp_path, "\n".join(pods[0] + pods[1]))
    elif form == "one file per pod":
        found = page(tmp_path, *("\n".join(lines) for lines in pods))
    else:
        time = "2026-11-27T21:44:0{node}.123456789Z " if form == "timestamps" else ""
        said = [
            f"[pod/ddp-4f2a1c-node-0-{node}-xk2lp/node] {time.format(node=node)}{lines[number]}"
            for number in range(max(map(len, pods)))
            for node, lines in enumerate(pods)
            if number < len(lines)
        ]
        found = page(tmp_path, "\n".join(said))
    first = found.findings[0]
    assert (first.name, first.ranks) == ("unused_parameters", (3,)), first
    assert "(train.py:12 in <module>)" in first.title and "find_unused_parameters=True" in first.fix


# ---- collectives that reached their timeout


def watchdog(rank: int, number: int = 57, op: str = "ALLREDUCE", group: str = "0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E1127 12:10:00.000001 ProcessGroupNCCL.cpp:632] [PG ID {group} Rank {rank}] Watchdog caught"
        f" collective operation timeout: WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1024, NumelOut=1024,"
        " Timeout(ms)=600000) ran for 600071 milliseconds before timing out.\n"
    )


def progress(rank: int, called: int) -> str:
    return (
        f"[rank{rank}]:[E1127 12:10:00.000002 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f" failure detected by watchdog at work sequence id: {called} PG status: last enqueued work: {called}, last"
        f" completed work: {called - 1}\n"
    )


def test_who_did_not_call_the_collective(tmp_path):
    text = "".join(watchdog(rank) + progress(rank, 57) for rank in (0, 1, 3)) + watchdog(2, 90, group="4 PG GUID 9(tp)")
    (finding,) = page(tmp_path, text + progress(2, 56)).findings
    assert (finding.name, finding.ranks) == ("collective_timeout", (2,))
    assert finding.title == "rank 2 did not call ALLREDUCE #57, in which the others waited"
    assert "rank 2: #56" in finding.evidence and "waited 600 s" in finding.evidence
    silent = "".join(watchdog(rank) for rank in (0, 1, 3)) + "[rank2]: step 56\n"
    (finding,) = page(tmp_path, silent).findings
    assert finding.ranks == (2,)
    assert finding.title == "ALLREDUCE #57 reached its timeout on ranks 0, 1, 3; rank 2 did not report it"
    (finding,) = page(tmp_path, watchdog(0) + watchdog(1, op="BROADCAST")).findings
    assert finding.title == "rank 0 called ALLREDUCE #57 and rank 1 BROADCAST #57"
    (finding,) = page(tmp_path, watchdog(0) + watchdog(1)).findings
    assert finding.title == "ALLREDUCE #57 reached its timeout on ranks 0, 1"


def test_a_timeout_after_a_failure_is_its_consequence(tmp_path):
    text = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/a.py", line 4, in go\n[rank1]: KeyError: 1\n'
    )
    found = page(tmp_path, text + watchdog(0))
    assert names(found) == ["first_failure", "collective_timeout"]
    assert found.findings[0].ranks == found.findings[1].ranks == (1,)


# ---- NCCL


def nccl(rank: int, text: str, host: str = "", level: str = "INFO") -> str:
    host = host or f"node{rank // 2}"
    return f"{host}:{100 + rank}:{200 + rank} [{rank % 2}] NCCL {level} {text}\n"


def job(inside: str = "P2P/CUMEM", between: str = "NET/IB/0/GDRDMA", network: str = "IB", **changed: str) -> str:
    """What four ranks on two nodes write; `changed` replaces lines."""
    text = ""
    for rank in range(4):
        comm = f"ncclCommInitRankConfig comm 0x55{rank} rank {rank} nranks 4 cudaDev {rank % 2} nvmlDev {rank % 2}"
        comm += f" busId {rank}000 commId 0xabc -"
        text += nccl(rank, "NCCL version " + changed.get(f"version{rank}", "2.27.3+cuda12.9"))
        text += nccl(rank, f"Bootstrap: Using {changed.get('interface', 'eth0')}:10.0.0.{rank // 2}<0>")
        text += nccl(rank, f"Using network {network}")
        text += nccl(rank, f"{comm} Init START")
        neighbour = rank ^ 1
        text += nccl(rank, f"Channel 00/0 : {rank}[{rank % 2}] -> {neighbour}[{neighbour % 2}] via {inside}")
        if rank in (1, 3):
            other = (rank + 1) % 4
            text += nccl(rank, f"Channel 00/0 : {rank}[1] -> {other}[0] [send] via {between}")
        text += nccl(rank, f"{comm} Init COMPLETE")
    return text


def test_nccl_that_is_as_it_should_be(tmp_path):
    found = page(tmp_path, job())
    assert not found.findings
    pairs = {(pair["where"], pair["transport"]): pair["pairs"] for pair in found.figures["nccl"]["pairs"]}
    assert pairs == {("within a node", "P2P"): 4, ("between nodes", "NET/IB/GDRDMA"): 2}
    (comm,) = found.figures["nccl"]["communicators"]
    assert comm == {"ranks": 4, "began": 4, "completed": 4, "absent": []}


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (job(inside="SHM/direct/direct"), "nccl_no_p2p", "usual for GeForce and T4"),
        (job(inside="SHM/direct") + nccl(0, "NCCL_P2P_DISABLE set by environment to 1."), "nccl_no_p2p", "=1 is set"),
        (job(between="NET/Socket/0", network="Socket"), "nccl_sockets", "no InfiniBand or RoCE device"),
        (
            job(between="NET/Socket/0") + nccl(0, "NCCL_IB_DISABLE set by environment to 1."),
            "nccl_sockets",
            "NCCL_IB_DISABLE=1 is set",
        ),
        (job(between="NET/IB/0"), "nccl_no_gdr", "not available"),
        (job(inside="NET/IB/0/GDRDMA"), "nccl_network_inside", "container"),
        (job(version2="2.21.5+cuda12.4"), "nccl_versions", "differs between versions"),
        (job(interface="docker0"), "nccl_interface", "first interface"),
        (
            job() + "\n[2026-01-01 10:00:00] node0:100:200 [0] os/linux.cc:795 NCCL WARN Error: failed to extend"
            " /dev/shm/nccl-ab12 to 9637892 bytes, error: No space left on device (28)\n",
            "nccl_shared_memory",
            "64 MB",
        ),
        (job(between="NET/AWS Libfabric/0"), "nccl_no_gdr", "not available"),
        (job(between="NET/IBext_v8/0/Shared"), "nccl_no_gdr", "not available"),
        (
            nccl(0, "Cuda failure 217 'peer access is not supported between these two devices'", level="WARN"),
            "peer_access",
            "usual for GeForce",
        ),
        (
            nccl(0, "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", level="WARN"),
            "nccl_unreachable",
            "GID index",
        ),
        (
            nccl(0, "socketStartConnect: Connect to 10.1.1.2<43719> failed : No route to host", level="WARN"),
            "nccl_unreachable",
            "firewall",
        ),
        (
            nccl(
                0,
                "socketPollConnect: connect to 169.254.20.10<52597> returned Connection refused, exceeded error retry"
                " count after 35 attempts",
                level="WARN",
            ),
            "nccl_unreachable",
            "cannot reach",
        ),
        (
            nccl(0, "NET/IB : mlx5_0:1 Got async event : port error", level="WARN")
            + nccl(1, "NET/IB : Got completion from peer n0<37948> with error 12, opcode 2, len 1", level="WARN"),
            "nccl_port_error",
            "a cable",
        ),
        (
            nccl(0, "Bootstrap Root : rank 1 of 8 ranks has already checked in", level="WARN"),
            "nccl_rank_twice",
            "--node-rank",
        ),
        (
            nccl(0, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", level="WARN"),
            "nccl_locked_memory",
            "limit of locked memory",
        ),
    ],
)
def test_what_is_off_in_nccl(tmp_path, text, name, says):
    (finding,) = page(tmp_path, text).findings
    assert finding.name == name
    assert says in finding.cause


def test_a_communicator_that_is_never_completed(tmp_path):
    lines = [line for line in job().splitlines(keepends=True) if "COMPLETE" not in line and "Channel" not in line]
    found = page(tmp_path, "".join(line for line in lines if not line.startswith("node1:103")))
    (finding,) = found.findings
    assert (finding.name, finding.ranks) == ("nccl_not_initialized", (3,))
    assert finding.title == "1 rank of 4 never joined a communicator of NCCL"
    (finding,) = page(tmp_path, "".join(lines)).findings
    assert finding.title == "a communicator of NCCL with 4 ranks was never completed"


def test_efa_is_as_it_should_be(tmp_path):
    found = page(tmp_path, job(between="NET/AWS Libfabric/0/GDRDMA", network="Libfabric"))
    assert not found.findings
    transports = {pair["transport"] for pair in found.figures["nccl"]["pairs"]}
    assert transports == {"P2P", "NET/AWS Libfabric/GDRDMA"}


def test_shared_memory_explains_what_nccl_raises(tmp_path):
    """Neither the error that torch raises, "NCCL error: unhandled system error", nor the communicator that was never
    completed is a second finding."""
    text = (
        nccl(0, "ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0xabc - Init START")
        + nccl(0, "Error: failed to extend /dev/shm/nccl-ab12 to 9637892 bytes", level="WARN")
        + '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/x/a.py", line 4, in go\n'
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:90, unhandled system error\n"
    )
    assert names(page(tmp_path, text)) == ["nccl_shared_memory"]


# ---- who else labels lines


_TRACED = ("Traceback (most recent call last):", '  File "/x/a.py", line 4, in go', "    f()", "KeyError: 'x'")
_RAY = ("- (node_id=aa, ip=10.0.0.1, pid=31) world_rank=0, local_rank=0", "- (ip=10.0.0.1, pid=32) world_rank=1")
_BOX = ("╭───── Traceback (most recent call last) ─────╮", "│ /x/a.py:4 in go │", "│ ❱ 4     f() │", "╰─╯", _TRACED[3])
_EXCEPTION_GROUP = (
    "  + Exception Group Traceback (most recent call last):",
    '  |   File "/x/b.py", line 9, in main',
    "  | ExceptionGroup: two (1 sub-exception)",
    "  +-+---------------- 1 ----------------",
    *(f"    | {line}" for line in _TRACED),
    "    +------------------------------------",
)


def labelled(label: str, lines: Sequence[str] = _TRACED) -> str:
    return "".join(f"{label}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "who"),
    {
        "mpirun": ("[1,0]<stdout>:step 1 loss 2.0\n" + labelled("[1,1]<stderr>:"), "rank 1"),
        "prterun": (labelled("[prterun-n1-77@1,1]<stderr>: "), "rank 1"),
        "pdsh": ("worker-0: step 1 loss 2.0\n" + labelled("worker-1: "), "worker-1"),
        "compose": (labelled("trainer-1  | "), "trainer-1"),
        "Ray": (labelled("(Trainer pid=9) ", _RAY) + labelled("(RayTrainWorker pid=32) "), "rank 1"),
        "Ray alone": (labelled("(RayTrainWorker pid=32, ip=10.0.0.2) "), "RayTrainWorker pid=32"),
        "JSON": (json.dumps({"time": "2026-11-02T10:11:12Z", "rank": 1, "msg": "\n".join(_TRACED)}) + "\n", "rank 1"),
        "Docker": ("".join(json.dumps({"log": line + "\n"}) + "\n" for line in _TRACED), "0.log"),
        "SageMaker": (labelled("[1,mpirank:1,algo-2]<stderr>:"), "rank 1"),
        "flux": ("flux-job: task(s) exited with exit code 1\n" + labelled("1: "), "rank 1"),
        "rich": (labelled("[rank1]: ", _BOX), "rank 1"),
        "a group": (labelled("[rank1]: ", _EXCEPTION_GROUP), "rank 1"),
        "a bar": ("0: \r 10%|#  |\r 20%|## |\n" + labelled("1: \r 10%|# |\r", _TRACED), "rank 1"),
    }.values(),
)
def test_tracebacks_behind_other_labels(text, who, tmp_path):
    assert page(tmp_path, text).findings[0].title == f"{who} failed: KeyError: 'x' (a.py:4 in go)"


_KILLED = "mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9 (Killed).\n"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("step 1 loss 2.0\n" + _KILLED, "rank 3 was killed (SIGKILL)"),
        ("[rank0]: step 3 loss 1.0\n[rank1]: torch.DistError: timed out\n", "rank 1 failed: DistError: timed out"),
        ("{'loss': 2.31, 'epoch': 0.1}\n{'loss': nan, 'epoch': 0.2}\n", "the loss is nan in line 2 of 0.log"),
        ("step 1 loss 2.0\n\0\0\0\0\n" + labelled(""), "0.log failed: KeyError: 'x' (a.py:4 in go)"),
    ],
)
def test_what_launchers_and_trainers_leave_without_a_traceback(text, title, tmp_path):
    assert [finding.title for finding in page(tmp_path, text).findings] == [title]


def test_an_error_that_a_rank_survived_is_none(tmp_path):
    assert names(page(tmp_path, "[rank1]: ConnectionError: retrying\n[rank1]: step 4 loss 1.0\n")) == []


def test_a_log_that_powershell_has_redirected(tmp_path):
    (tmp_path / "job.log").write_text("step 1 loss 2.0\r\n" + "\r\n".join(_TRACED) + "\r\n", encoding="utf-16")
    assert opening.explain([tmp_path])[0].findings[0].title == "job.log failed: KeyError: 'x' (a.py:4 in go)"


def test_a_device_that_ran_out_of_memory(tmp_path):
    text = labelled("[rank1]: ", (*_TRACED[:3], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."))
    (finding,) = page(tmp_path, text).findings
    assert (finding.name, finding.title) == ("out_of_memory", "rank 1: a device ran out of memory (a.py:4 in go)")


def test_a_file_of_nccl_has_any_suffix(tmp_path):
    (tmp_path / "nccl.node1.4711").write_text(job(), encoding="utf-8")
    assert opening.explain([tmp_path])[0].figures["nccl"]


@pytest.mark.parametrize("status", ["status=12 opcode=0", "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)"])
def test_a_transfer_that_the_network_gave_up(status, tmp_path):
    text = nccl(0, f"NET/IB : Got completion from peer 10.0.0.2<52423> with {status} vendor err 129", level="WARN")
    found = page(tmp_path, text)
    assert names(found) == ["nccl_transfer_failed"]
    assert found.findings[0].title.endswith("and 10.0.0.2 failed (status 12)")
    assert not any("No error" in note for note in found.notes)


def test_a_transfer_that_failed_because_its_peer_did(tmp_path):
    text = nccl(0, "NET/IB : Got completion from peer 10.0.0.2<52423> with status=12 opcode=0", level="WARN")
    assert names(page(tmp_path, text + labelled("[rank1]: "))) == ["first_failure"]


# ---- hostile and strange files


def test_what_is_no_log(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n", encoding="utf-8")
    with pytest.raises(ForeignError, match=r"train\.py is a script; name what a job wrote"):
        opening.explain([tmp_path / "train.py"])
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 16)
    with pytest.raises(ForeignError, match="nothing that can be explained"):
        opening.explain([tmp_path / "weights.bin"])
    with pytest.raises(ForeignError, match="has no file that can be explained"):
        opening.explain([tmp_path])


def test_a_line_without_end_and_colours(tmp_path):
    text = "x" * 3_000_000 + "\n\x1b[31m[rank1]: Traceback (most recent call last):\x1b[0m\n"
    text += '\x1b[31m[rank1]:   File "/x/a.py", line 4, in go\n[rank1]: KeyError: 1\x1b[0m\n 10%|#  |\r 20%|\r done\n'
    found = page(tmp_path, text)
    assert found.findings[0].title == "rank 1 failed: KeyError: 1 (a.py:4 in go)"
    assert all(len(cell) < 100 for table in found.tables for row in table.rows for cell in row)


def test_a_hundred_damaged_logs(tmp_path, failed):
    drawn = random.Random(3)
    whole = (failed / "all.txt").read_bytes() + (job() + watchdog(0) + _LABELLED + _ENDED).encode()
    for number in range(100):
        data = bytearray(whole)
        for _ in range(drawn.randrange(1, 60)):
            at = drawn.randrange(len(data))
            data[at : at + drawn.randrange(8)] = bytes(drawn.randrange(1, 256) for _ in range(drawn.randrange(8)))
        path = tmp_path / f"{number}.log"
        path.write_bytes(data)
        try:
            labkit.explain(path)._repr_html_()
        except ForeignError:
            assert b"\0" in data[: 1 << 16] or data[: 1 << 16].decode(errors="ignore") != data[: 1 << 16].decode(
                "latin"
            )


def test_mutated_logs_never_crash(failed, tmp_path):
    generator = random.Random(5)
    lines = [*STEPS, *(failed / "all.txt").read_text(encoding="utf-8").splitlines()]
    lines.append("node-1:7:9 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0")
    lines.append("srun: error: node-1: task 1: Out Of Memory")
    plain = "\n".join(lines).encode()
    tokens = [b"\0", b"\xff\xfe", b"Traceback (most recent call last):\n", b"[rank7]: ", b"{", b"9" * 40, b"\n", b"\r"]
    for number in range(100):
        data = bytearray(plain)
        for _ in range(generator.randrange(1, 9)):
            at = generator.randrange(len(data))
            data[at : at + generator.randrange(400)] = generator.choice(tokens)
        path = tmp_path / f"{number}.log"
        path.write_bytes(data)
        (found,) = opening.explain([path])
        json.dumps(found.figures, allow_nan=False)
        list(found.events())
