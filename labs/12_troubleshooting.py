# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Troubleshooting: what is wrong with this run?
#
# One run hangs. Another fails on all ranks at once. A third trains for days and learns from half of its data. For each
# case you see the **symptoms** first and make a guess. Then the lab shows its finding, with evidence, cause and fix.
# **Every run of this lab is broken deliberately, by fault injection.** The cells of this lab compute for about 1
# minute on two cores.

# %%
import os
import time
from pathlib import Path

from labkit import Spec, check, diff_scripts, excerpt, guess, place, run

HERE = place(2)
SMALL = {**HERE, "workload": "mlp", "batch_size": 32, "samples": 2048, "hang_after": 3}
print(HERE)

# %% [markdown]
# The cells below spell the name of each fault *backwards*, so that you do not read it by accident.


# %%
def spec_of(fault, **more):
    """The Spec of a case; the name of the fault is spelled backwards."""
    return Spec("ddp", fault=fault[::-1], **{**SMALL, **more})


def tail(job, rank, lines=8):
    """The last lines that a rank wrote to stderr, without the paths of this machine."""
    text = job.logs(rank, "stderr").replace(str(job.folder.path), "…")
    return "\n".join(text.splitlines()[-lines:]) or "(nothing)"


# %% [markdown]
# ## Case 1: "It trains, but the result is no better than with one GPU"
#
# The loss decreases, stderr is empty, and the throughput in samples per second is as expected. The chart has three
# lines: how many do you see, and what is odd about the two ranks?

# %%
first = run(spec_of("relpmas_on", steps=30)).wait()
print(first.words)
first.figure("loss")

# %%
for step, losses in enumerate(zip(*(rank.steps.loss for rank in first.state.ranks.values())), 1):
    if step in (1, 2, 10, 20, 30):
        print(f"step {step:2}   rank 0: {losses[0]:.6f}   rank 1: {losses[1]:.6f}")

# %% [markdown]
# <details class="answer"><summary>A guess</summary>
#
# Different samples give different losses. These two ranks have the same loss in each step, so they compute the same
# gradient from the same samples. Its average is the gradient of a single GPU: half of the work is redundant.
#
# </details>

# %%
first.findings()

# %% [markdown]
# These lines fix the script (`-` is the broken script, `+` the fixed one):

# %%
diff_scripts(spec_of("relpmas_on", steps=30), Spec("ddp", **SMALL, steps=30))

# %% [markdown]
# ## Case 2: "The second epoch improves less than I expected"
#
# There is no error, no warning, and the two ranks have different losses. The charts show nothing, so read the loop.
# Which line is missing?

# %%
excerpt(spec_of("hcope_tes_on", epochs=2, samples=512), "train")

# %%
second = run(spec_of("hcope_tes_on", epochs=2, samples=512)).wait()
second.findings()

# %% [markdown]
# <details class="answer"><summary>Why this is hard to notice</summary>
#
# Each epoch contains all samples, in exactly the same order and in exactly the same batches. Training still works and
# generalises slightly worse. A mistake that no chart shows is the most expensive kind.
#
# </details>
#
# ## Case 3: "It makes no progress"
#
# The state is *training*, the GPUs show 100 % utilisation, and nothing has been printed for minutes. A collective that
# hangs ends only at its timeout: NCCL's watchdog aborts the process after 10 minutes, gloo raises an error after 30. So
# this cell waits until the lab detects the hang (here after 3 seconds without progress, `hang_after=3`; the default is
# 30) and leaves the run hanging.

# %%
third = run(spec_of("evitcelloc_deppiks", steps=30)).wait(until="hang")
time.sleep(2)  # so that the lab detects the other rank too
print(third.words, "· steps done:", third.state.step)
print("stderr of rank 0:", tail(third, 0))
print("stderr of rank 1:", tail(third, 1))

# %% [markdown]
# What would you want to know now? There are two ranks, and each is blocked at one line of the script.
#
# <details class="answer"><summary>A guess</summary>
#
# A collective completes only when every rank in its group calls it. So the question is not "which rank is slow" but
# "which rank is **at a different line**". You need the line at which *each* rank is blocked, and the collective that it
# waits in.
#
# </details>

# %%
third.findings()

# %%
third.stop()
print(third.words)

# %% [markdown]
# Without the lab: `py-spy dump --pid …` on **each** rank shows the same two lines, and with
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch checks that all ranks call the same collectives. If you wait for NCCL's
# timeout, the log says `Watchdog caught collective operation timeout: WorkNCCL(SeqNum=…, OpType=ALLREDUCE, …) ran for
# 600000 milliseconds before timing out`. `SeqNum` and `OpType` name the collective. The rank that prints it is usually
# the one that *waited*: look for the rank that is at another line. `init_process_group(timeout=…)` changes the timeout.
#
# ## Case 4: "It stops at the end of training"
#
# Training works up to the last step. Then there is no more output, or an error about a closed connection. Read the end
# of `train`, and predict what each rank does, and how many of the 20 steps the run finishes.

# %%
fourth = spec_of("0_knar_no_noitaulave", steps=20)
print("…\n" + "\n".join(excerpt(fourth, "train").splitlines()[-15:]))

# %%
excerpt(fourth, "evaluate")

# %%
my_guess = guess("steps", ...)
fourth = run(fourth).wait(until="evaluation_on_one_rank").stop()
print(fourth.words)
my_guess

# %%
fourth.findings()

# %% [markdown]
# <details class="answer"><summary>"But only rank 0 prints, so only rank 0 needs to evaluate"</summary>
#
# `evaluate` ends with an all-reduce of the counts of all ranks, and rank 1 never calls it. With a sharded model, even
# the forward pass contains collectives. Let all ranks evaluate, and let one of them print.
#
# </details>
#
# ## Case 5: "It failed on all ranks at once"
#
# Both ranks end within the same second. These are the last lines of each.

# %%
fifth = run(spec_of("yromem_fo_tuo", steps=20)).wait()
for rank in (0, 1):
    print(f"---- rank {rank}\n{tail(fifth, rank, 3)}")

# %% [markdown]
# Two ranks, two errors. One of them is the cause, and the other rank was terminated because of it. Which is which?

# %%
fifth.findings()

# %% [markdown]
# <details class="answer"><summary>How to find the cause</summary>
#
# "Connection closed by peer", "broken pipe" and "timed out" mean that *another* rank has failed. Look for the rank with
# a different and earlier error. torchrun also reports the first failure, under *Root Cause (first observed failure)*.
#
# </details>
#
# ## Case 6: "My checkpoint does not load"
#
# This is an independent script. It saves on two ranks, and a single device is supposed to load the file.

# %%
SAVES = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 2))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "saved.pt")
dist.barrier()

alone = nn.Linear(4, 2)
weights = torch.load("saved.pt", weights_only=True)
print("saved:", *weights)
print("expected:", *alone.state_dict())
alone.load_state_dict(weights)
"""
Path("saves.py").write_text(SAVES)
sixth = run("saves.py", nproc=2, device="cpu").wait()
print(sixth.logs(0))

# %%
sixth.findings()

# %% [markdown]
# What is the shortest fix in the script that saves?
#
# <details class="answer"><summary>Answer</summary>
#
# `model.module.state_dict()`. DDP stores the model as `module`, which becomes a prefix of each name. Saved this way,
# any device can load the file. For an existing file, remove the prefix from the names: that is the first exercise
# below.
#
# </details>
#
# ## NCCL errors on other systems
#
# Some errors cannot occur on this machine. These are **quoted** messages of torch and NCCL from systems on which
# courses often run. What is the cause of each?
#
# | system | message |
# | --- | --- |
# | Windows, macOS | `Distributed package doesn't have NCCL built in` |
# | Colab, one GPU, `--nproc-per-node=2` | `CUDA error: invalid device ordinal` |
# | the same, with `set_device(0)` on both | `ncclInvalidUsage … Duplicate GPU detected` |
# | Kaggle or Colab, ranks started from the notebook | `Cannot re-initialize CUDA in forked subprocess` |
# | a container | `Error while creating shared memory segment /dev/shm/nccl-… : No space left on device` |
# | any system, a second job | `EADDRINUSE: Address already in use` |
# | GPUs, ten minutes after a rank took another branch | `Watchdog caught collective operation timeout` |

# %% [markdown]
# The lab recognises these messages in a run. The following script only raises them, to replace the system that you do
# not have here:

# %%
MESSAGES = {
    "Windows": "Distributed package doesn't have NCCL built in",
    "Colab": "CUDA error: invalid device ordinal",
    "Colab-2": "NCCL error: ncclInvalidUsage\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 40",
    "Kaggle": "Cannot re-initialize CUDA in forked subprocess. "
    "To use CUDA with multiprocessing, use the 'spawn' start method",
    "container": "Error while creating shared memory segment /dev/shm/nccl-x9Yb2C: No space left on device",
    "second job": "EADDRINUSE: Address already in use",
    "GPUs": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=118, OpType=ALLREDUCE, "
    "NumelIn=405898, NumelOut=405898, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
}
Path("elsewhere.py").write_text(f"import sys\nraise RuntimeError({MESSAGES!r}[sys.argv[1]])\n")
run("elsewhere.py", nproc=1, device="cpu", args=("Windows",)).wait().findings()

# %% tags=["long"]
for system in list(MESSAGES)[1:]:
    seen = run("elsewhere.py", nproc=1, device="cpu", args=(system,)).wait().findings()[0]
    print(f"{system}: {seen.title}\n    Cause: {seen.cause}\n    Fix: {seen.fix}\n")

# %% [markdown]
# ## NCCL_DEBUG: what to set, what to read
#
# | set | effect |
# | --- | --- |
# | `NCCL_DEBUG=WARN` | one line per failure; cheap enough to leave it on |
# | `NCCL_DEBUG=INFO` | interfaces, transports and rings, at the start of every group |
# | `NCCL_DEBUG_SUBSYS=INIT,NET` | only these subsystems |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | one file per host and process instead of stdout |
# | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | torch's own check for collective mismatches, also with gloo |
#
# These lines are examples of the output, **shortened** and not from this machine:
#
# ```text
# [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>
# [0] NCCL INFO NET/IB : No device found.
# [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
# [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
# [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
# [1] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x9Yb2C (size 9637888)
# ```
#
# 1. In a log of a thousand lines, which line do you look for first?
# 2. Do the two GPUs of one machine communicate directly? Would `via SHM/direct/direct` be better or worse?
# 3. Between machines: is InfiniBand in use?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The first `WARN`. The errors on other ranks are its consequences.
# 2. Yes: `P2P` is from GPU to GPU. `SHM` goes through host memory, which is slower.
# 3. No: `NET/IB : No device found`, so the traffic uses TCP sockets on eth0. If that is the wrong interface, set
#    `NCCL_SOCKET_IFNAME`.
#
# </details>

# %%
if HERE["device"] == "cuda":
    os.environ["NCCL_DEBUG"] = "INFO"
    log = run("ddp", **SMALL, steps=3).wait().logs(0)
    del os.environ["NCCL_DEBUG"]
    print("\n".join([line for line in log.splitlines() if "NCCL" in line][:20]))
else:
    print("These ranks use gloo, so there is no NCCL output here.")

# %% [markdown]
# ## Exercise: without the wrapper
#
# Write a function that takes the state dict of a wrapped model and returns the one of the model itself. Handle a layer
# that happens to be called `submodule`, and a state dict that was saved without the wrapper.


# %% tags=["exercise"]
def unwrapped(state): ...


check("troubleshooting.prefix", unwrapped)

# %% [markdown]
# ## Exercise: which rank is at a different line?
#
# This is a made-up hang of four ranks. Which rank took a different branch, and at which line of the script is it?
# Answer with a pair, `(rank, line)`.
#
# ```text
# rank 0: in all_reduce number 118 (405898) at train.py:96 in train_step, 57 steps done
# rank 1: in all_reduce number 118 (405898) at train.py:96 in train_step, 57 steps done
# rank 2: in barrier number 118 at train.py:131 in save, 57 steps done
# rank 3: in all_reduce number 118 (405898) at train.py:96 in train_step, 57 steps done
# ```

# %% tags=["exercise"]
stray = ...
check("troubleshooting.stray", stray)

# %% [markdown]
# ## Exercise: fix a broken script
#
# `broken.py` contains four mistakes from this lab. Fix the text in this cell, run this cell and the next, and read the
# findings. The script must still train for two epochs on both ranks, print the accuracy after each epoch, and save the
# model.

# %%
BROKEN = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(1024, 20)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = DataLoader(dataset, 32, shuffle=True)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        correct = (model(inputs).argmax(1) == dataset.tensors[1]).float().mean()
        dist.all_reduce(correct)
        print(f"epoch {epoch}: {correct / dist.get_world_size():.1%} correct", flush=True)
    torch.save(model.module.state_dict(), "broken.pt")
dist.destroy_process_group()
"""

# %%
Path("broken.py").write_text(BROKEN)
print("broken.py is written")

# %% [markdown]
# Your answer is a run: `run("broken.py", nproc=2, device="cpu", hang_after=3).wait(timeout=60)`. You can also check a
# run that hangs: the verdict says where it hangs. `.stop()` terminates it.

# %% tags=["exercise"]
fixed = ...
check("troubleshooting.mend", fixed)

# %% [markdown]
# ## Summary
#
# - The rank with the most output is rarely the cause. Look for the rank that failed **first**, and for the rank that is
#   **at a different line**.
# - A run that trains the wrong thing raises no error. Print what each rank has: its first samples, its loss, its epoch.
# - Collectives are matched only by their order. Call no collective inside `if rank == 0`.
# - Save `model.module` from a single rank, and read the first `WARN`.
