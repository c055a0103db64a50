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
# # The clinic: what is wrong with this run?
#
# A run hangs. Another dies on all ranks at once. A third goes on for days, and has learned from half of its data. Each comes here as a
# patient: you see its **symptoms** first, you make a guess, and then the lab says what it found, by which evidence, and what to do.
# **Every run of this lab is broken on purpose.**

# %%
import os
import time
from pathlib import Path

from labkit import Spec, check, diff_scripts, excerpt, place, run

HERE = place(2)
SMALL = {**HERE, "workload": "mlp", "batch_size": 32, "samples": 2048, "hang_after": 3}
print(HERE)

# %% [markdown]
# What is wrong with a patient stands in the cells below *backwards*, so that you do not read it by accident.


# %%
def spec_of(illness, **more):
    """What a patient was asked to do; the name of the illness is written backwards."""
    return Spec("ddp", fault=illness[::-1], **{**SMALL, **more})


def tail(job, rank, lines=8):
    """The last lines that a rank wrote to stderr, without the paths of this machine."""
    text = job.logs(rank, "stderr").replace(str(job.folder.path), "…")
    return "\n".join(text.splitlines()[-lines:]) or "(nothing)"


# %% [markdown]
# ## Patient 1: "It trains, but it does not get better than one GPU"
#
# The loss falls, nothing is said on stderr, and as many samples go through in a second as one would wish. The chart has three
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
# Different samples give different losses. These two ranks have the same loss at each step, so they compute the same gradient from
# the same samples, and its average is what one GPU has alone: twice the work for nothing.
#
# </details>

# %%
first.findings()

# %% [markdown]
# The mended script has these lines more (`-` is the patient, `+` is health):

# %%
print(diff_scripts(spec_of("relpmas_on", steps=30), Spec("ddp", **SMALL, steps=30)))

# %% [markdown]
# ## Patient 2: "The second epoch brings less than I thought"
#
# No error, no warning, two different losses on two ranks. There is nothing to see in the charts, so read the loop. Which line that
# you would expect is missing?

# %%
print(excerpt(spec_of("hcope_tes_on", epochs=2, samples=512), "train"))

# %%
second = run(spec_of("hcope_tes_on", epochs=2, samples=512)).wait()
second.findings()

# %% [markdown]
# <details class="answer"><summary>Why nobody notices</summary>
#
# Each epoch has all samples, in the very same order and in the very same batches. Training still works, and generalises a little
# worse: the most expensive kind of mistake is one that no figure shows.
#
# </details>
#
# ## Patient 3: "It just stands there"
#
# The state is *training*, the GPUs show 100 %, nothing is printed for minutes. A run that hangs never ends by itself, so this cell waits
# until the lab notices (here after 3 seconds without progress, `hang_after=3`; as a rule 30) and leaves it hanging.

# %%
third = run(spec_of("evitcelloc_deppiks", steps=30)).wait(until="hang")
time.sleep(2)  # so that the other rank is noticed too
print(third.words, "· steps done:", third.state.step)
print("rank 0 says on stderr:", tail(third, 0))
print("rank 1 says on stderr:", tail(third, 1))

# %% [markdown]
# What would you want to know now? There are two ranks, and each stands at one line of the script.
#
# <details class="answer"><summary>A guess</summary>
#
# A collective ends when every rank of its group has come to it. So the question is not "which rank is slow" but "which rank is
# **somewhere else**". One needs the line where *each* rank stands, and the collective that it waits in.
#
# </details>

# %%
third.findings()

# %%
third.stop()
print(third.words)

# %% [markdown]
# Without the lab: `py-spy dump --pid …` on **each** rank shows the same two lines, and `TORCH_DISTRIBUTED_DEBUG=DETAIL` has torch
# check that all ranks call the same collectives.
#
# ## Patient 4: "It stops whenever it has trained well"
#
# Training is healthy to the last step. Then nothing comes any more, or an error about a peer that has gone. Predict from the end of its
# `train` what each rank does.

# %%
fourth = spec_of("0_knar_no_noitaulave", steps=20)
print("…\n" + "\n".join(excerpt(fourth, "train").splitlines()[-15:]))

# %%
print(excerpt(fourth, "evaluate"))

# %%
fourth = run(fourth).wait(until="evaluation_on_one_rank").stop()
print(fourth.words)
fourth.findings()

# %% [markdown]
# <details class="answer"><summary>"But only rank 0 prints, so only rank 0 needs to evaluate"</summary>
#
# `evaluate` ends with an all-reduce: each rank has counted over its share. Rank 1 never comes. With a sharded model even the
# forward pass is a collective. Let all ranks evaluate, and let one of them print.
#
# </details>
#
# ## Patient 5: "It died on all ranks at once"
#
# Both ranks end within the same second. These are the last lines that each of them wrote.

# %%
fifth = run(spec_of("yromem_fo_tuo", steps=20)).wait()
for rank in (0, 1):
    print(f"---- rank {rank}\n{tail(fifth, rank, 3)}")

# %% [markdown]
# Two ranks, two errors. One of them is the cause, the other only fell with it. Which is which?

# %%
fifth.findings()

# %% [markdown]
# <details class="answer"><summary>How to tell</summary>
#
# "Connection closed by peer", "broken pipe", "timed out" say that *another* rank has gone. Look for the rank that says something
# else, and first. torchrun says which one was first too, under *Root Cause (first observed failure)*.
#
# </details>
#
# ## Patient 6: "My checkpoint does not load"
#
# A script of one's own. It saves on two ranks, and one device is to load it.

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
print("wanted:", *alone.state_dict())
alone.load_state_dict(weights)
"""
Path("saves.py").write_text(SAVES)
sixth = run("saves.py", nproc=2, device="cpu").wait()
print(sixth.logs(0))

# %%
sixth.findings()

# %% [markdown]
# What is the shortest way out, in the script that saves?
#
# <details class="answer"><summary>Answer</summary>
#
# `model.module.state_dict()`: DDP holds the model as `module`, and puts that before each name. Saved this way, any device can load
# it. For a file that is there already, take the prefix off the names: the first exercise below.
#
# </details>
#
# ## NCCL, elsewhere
#
# Some illnesses do not come to this machine. These are words of torch and NCCL, **quoted**, as they are met at the places where
# courses are held. What is the cause of each?
#
# | where | it says |
# | --- | --- |
# | Windows, macOS | `Distributed package doesn't have NCCL built in` |
# | Colab, one GPU, `--nproc-per-node=2` | `CUDA error: invalid device ordinal` |
# | the same, with `set_device(0)` on both | `ncclInvalidUsage … Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 40` |
# | Kaggle or Colab, ranks started from the notebook | `Cannot re-initialize CUDA in forked subprocess` |
# | a container | `Error while creating shared memory segment /dev/shm/nccl-… : No space left on device` |
# | any place, a second job | `EADDRINUSE: Address already in use` |

# %% [markdown]
# The lab knows these words when a run says them. This script does nothing but say them, in the place of the machine that is not here:

# %%
WORDS = {
    "Windows": "Distributed package doesn't have NCCL built in",
    "Colab": "CUDA error: invalid device ordinal",
    "Colab-2": "NCCL error: ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 40",
    "Kaggle": "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use the 'spawn' start method",
    "container": "Error while creating shared memory segment /dev/shm/nccl-x9Yb2C: No space left on device",
    "second job": "EADDRINUSE: Address already in use",
}
Path("elsewhere.py").write_text(f"import sys\nraise RuntimeError({WORDS!r}[sys.argv[1]])\n")
run("elsewhere.py", nproc=1, device="cpu", args=("Windows",)).wait().findings()

# %% tags=["long"]
for where in list(WORDS)[1:]:
    seen = run("elsewhere.py", nproc=1, device="cpu", args=(where,)).wait().findings()[0]
    print(f"{where}: {seen.title}\n    Cause: {seen.cause}\n    Fix: {seen.fix}\n")

# %% [markdown]
# ## NCCL_DEBUG: what to set, what to read
#
# | set | for |
# | --- | --- |
# | `NCCL_DEBUG=WARN` | one line where something fails; cheap enough to leave it on |
# | `NCCL_DEBUG=INFO` | which interfaces, which wires, which rings: at the start of every group |
# | `NCCL_DEBUG_SUBSYS=INIT,NET` | only that part of it |
# | `NCCL_DEBUG_FILE=nccl.%h.%p.log` | a file for each host and process instead of stdout |
# | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | torch's own look: collectives that do not match, on gloo too |
#
# Lines of this form, **shortened** and not from this machine, are what there is to find:
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
# 1. Which line does one look for first, in a log of a thousand?
# 2. Do the two GPUs of one machine talk directly? Would `via SHM/direct/direct` be better or worse?
# 3. Between machines: is InfiniBand in use?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. The first `WARN`. Everything that follows on other ranks follows from it.
# 2. Yes: `P2P` is from GPU to GPU. `SHM` goes through the host's memory, which is slower.
# 3. No: `NET/IB : No device found`, so it goes over the sockets of eth0. If that is the wrong interface, `NCCL_SOCKET_IFNAME` names
#    another.
#
# </details>

# %%
if HERE["device"] == "cuda":
    os.environ["NCCL_DEBUG"] = "INFO"
    said = run("ddp", **SMALL, steps=3).wait().logs(0)
    del os.environ["NCCL_DEBUG"]
    print("\n".join([line for line in said.splitlines() if "NCCL" in line][:20]))
else:
    print("These ranks talk through gloo, and NCCL has nothing to say here.")

# %% [markdown]
# ## Exercise: without the wrapper
#
# Write a function that takes the state dict of a wrapped model and gives the one of the model itself. Mind a layer that happens to
# be called `submodule`, and a state dict that was saved without the wrapper.


# %% tags=["exercise"]
def unwrapped(state): ...


check("troubleshooting.prefix", unwrapped)

# %% [markdown]
# ## Exercise: who is somewhere else?
#
# A hang of four ranks, made up for this exercise. Which rank took another way, and at which line of the script? Answer with a pair,
# `(rank, line)`.
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
# ## Exercise: mend a patient of your own
#
# `clinic.py` is yours, and it has four mistakes of this lab. Mend the text in this cell, run the cell and the next, and read what
# is found. It should still train for two epochs on both ranks, print how many are right after each, and save.

# %%
CLINIC = """\
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
    for batch, wanted in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), wanted).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        right = (model(inputs).argmax(1) == dataset.tensors[1]).float().mean()
        dist.all_reduce(right)
        print(f"epoch {epoch}: {right / dist.get_world_size():.1%} right", flush=True)
    torch.save(model.module.state_dict(), "clinic.pt")
dist.destroy_process_group()
"""

# %%
Path("clinic.py").write_text(CLINIC)
print("clinic.py is written")

# %% [markdown]
# A run to hand in: `run("clinic.py", nproc=2, device="cpu", hang_after=3).wait(timeout=60)`. One that hangs may be handed in too: the
# verdict says where it hangs, and `.stop()` ends it.

# %% tags=["exercise"]
mended = ...
check("troubleshooting.mend", mended)

# %% [markdown]
# ## What to take along
#
# - The loudest rank is seldom the cause: look for the rank that failed **first**, and for the one that is **somewhere else**.
# - Runs that train something else than was meant say nothing. Print what each rank has: its first samples, its loss, its epoch.
# - Collectives meet by their order alone. Whatever stands under `if rank == 0` must hold none.
# - Save `model.module`, write it from one rank, and read the first `WARN`.
