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
# # Failover: a rank dies, and the training goes on
#
# A job of two days on 64 GPUs dies in its 47th hour, because one of 64 processes was killed. What is left of it? As much as was
# saved. In this lab you read what a checkpoint must hold, kill a rank with your own hand, watch the group come back, and go on
# with another number of ranks.

# %%
import os
import shutil
import signal
import time

from labkit import Spec, check, excerpt, place, run, show

HERE = place(2)
SAVING = {**HERE, "workload": "mlp", "batch_size": 128, "scaling": "strong", "samples": 12_800, "save_every": 50}
print(HERE)

# %% [markdown]
# ## What a checkpoint holds
#
# This is how a rank of the DDP script saves:

# %%
print(excerpt(Spec("ddp", **SAVING), "save"))

# %% [markdown]
# 1. Every rank calls `save`, and all but one leave at once (`IS_LOGGING_RANK` is true only on rank 0). Why is one enough, and what
#    would happen if all of them wrote?
# 2. Why `getattr(model, "module", model)`?
# 3. Why is the file written under another name first, and renamed?
# 4. Why are the model's weights not enough?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Under DDP all ranks hold the same model and the same optimizer state; a second copy says nothing new. If all wrote to one file,
#    it would be whoever wrote last, or pieces of several.
# 2. DDP wraps the model, and its names begin with `module.`; saved without the wrapper, the checkpoint is that of one device, and any
#    number of ranks can load it.
# 3. A rank that dies while it writes leaves half a file. `replace` is atomic: under the final name there is a whole checkpoint or none.
# 4. AdamW keeps two averages for each weight; without them the next steps are other steps. The step says how far the data were
#    used, and the random state what dropout would draw next.
#
# </details>
#
# ## Predict: how large is it?
#
# The model has 669,706 parameters of 4 bytes, and AdamW keeps two numbers more for each. How many MB will a checkpoint have?

# %%
parameters = 669_706
predicted = parameters * 4 * (1 + 2)
print(f"{predicted / 1e6:.2f} MB")

# %% [markdown]
# ## Run: kill a rank
#
# 200 steps, a checkpoint every 50, and `max_restarts=1`: torchrun may start the group again, once. The next cell waits for step 80 and
# then ends rank 1 with SIGKILL, as the kernel does when memory runs short. **This is meant**: the rank cannot say a last word.
#
# Predict: does rank 0 live on? At which step does the group go on? How many steps are computed twice?

# %%
job = run("ddp", **SAVING, steps=200, max_restarts=1, sample_every=0)
while job.state.step < 80 and not job.state.over:
    time.sleep(0.02)
os.kill(job.state.ranks[1].pid, signal.SIGKILL)

# %%
show(job)

# %% [markdown]
# The rank that is left cannot go on: its next all-reduce waits for a peer that is no more. So torchrun ends it too, and starts **all**
# ranks anew, the same program from its first line. What brings them back to where they were is not torchrun but `resume`:

# %%
print(excerpt(Spec("ddp", **SAVING), "intact", "resume"))

# %%
print(job.logs(rank=0).replace(str(job.folder.path), "…"))
rank = job.state.ranks[0]
ended, began = int(rank.steps.step[rank.first_step - 1]), int(rank.steps.step[rank.first_step])
print(f"restarts: {job.summary()['restarts']}; ended after step {ended}, back with step {began}")
print(f"steps computed twice: {ended - began + 1}")

# %% [markdown]
# <details class="answer"><summary>What it cost</summary>
#
# The steps since the last checkpoint, and a start: Python, torch, the rendezvous, the data. In a small job the start is most of it. On
# many devices the steps are, and every device computes them again.
#
# </details>
#
# And the size?

# %%
newest = max(job.folder.checkpoints.glob("step*"))
written = sum(file.stat().st_size for file in newest.iterdir())
print(f"{newest.name}: {written / 1e6:.2f} MB; predicted {predicted / 1e6:.2f} MB")

# %% [markdown]
# ## Go on with another number of ranks
#
# The checkpoint holds the whole state, as one device would save it, so any number of ranks can load it. Resume from step 100 with
# four ranks. `scaling="strong"` says that all ranks together take 128 samples, so each of the four takes 32.
#
# Predict: will the losses of steps 101 to 200 be the same, nearly the same, or others?

# %%
shutil.rmtree("step100", ignore_errors=True)
shutil.copytree(job.folder.checkpoints / "step00000100", "step100")
four = run("ddp", **{**SAVING, **place(4)}, steps=200, resume="step100", sample_every=0).wait()
print(four.words)


# %%
def losses(job):
    """The mean loss of all ranks, by step; of steps that were computed twice, the second time."""
    each = [dict(zip(map(int, rank.steps.step), rank.steps.loss)) for rank in job.state.ranks.values()]
    return {step: sum(one[step] for one in each) / len(each) for step in each[0]}


before, after = losses(job), losses(four)
for step in (101, 102, 105, 110, 120, 150, 200):
    apart = abs(after[step] - before[step]) / before[step]
    print(f"step {step}: two ranks {before[step]:.6f}, four ranks {after[step]:.6f}, relative difference {apart:.0e}")

# %% [markdown]
# <details class="answer"><summary>Why they agree, and where they cease to</summary>
#
# The same 128 samples make the same mean gradient, whoever adds it up. Sums of 32-bit numbers in another order differ in their last
# digits, and AdamW lets such a difference grow from step to step. With `scaling="weak"` four ranks would take 512 samples a step: another
# training, with other steps to an epoch, and probably with another learning rate.
#
# </details>
#
# ## When every rank saves
#
# Under FSDP no rank holds the whole model. Gathering it on rank 0 needs the room that sharding was meant to save. So every rank
# writes what it has, and a small index says what lies where:

# %%
print(excerpt(Spec("fsdp2", **SAVING), "tensors_of", "save", "publish"))

# %% [markdown]
# Which lines run on every rank, which on rank 0 alone? What does the barrier guard?
#
# <details class="answer"><summary>Answer</summary>
#
# `dcp.save` is a collective: all ranks must call it, or the others wait. The folder gets its name from rank 0 when all parts are
# written, and the barrier keeps the others from the next steps until it has.
#
# </details>
#
# This run saves with two ranks and goes on with one. A shard of a half must become a whole: `dcp.load` reads those pieces that a
# rank needs.

# %% tags=["long"]
halves = run("fsdp2", **SAVING, steps=50).wait()
for file in sorted(max(halves.folder.checkpoints.glob("step*")).iterdir()):
    print(f"{file.name:16} {file.stat().st_size / 1e6:6.2f} MB")
whole = run("fsdp2", **{**SAVING, **place(1)}, steps=80, resume=halves.name)
show(whole)

# %% [markdown]
# ## What restarts do not cure
#
# This run fails **on purpose**, and it may start anew once. But its rank 1 is killed at step 5, every time. Predict what becomes of
# it, and what its checkpoints, one every 50 steps, do for it.

# %%
again = run("ddp", **SAVING, steps=200, max_restarts=1, fault="killed_rank").wait()
print(f"{again.words}; restarts: {again.summary()['restarts']}")
again.findings()

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Every start comes to step 5 and dies there, and no checkpoint is ever written. Restarts cure accidents: a machine that fails, a wire, a
# neighbour who took the memory. What comes again at the same step is no accident, and each restart only makes the bill longer. So
# `max_restarts` is small in practice, and the *first* failure is what one reads.
#
# </details>
#
# ## How often to save
#
# Saving costs time, and so does what is lost. If a checkpoint takes *C* seconds, and something fails every *M* seconds on average, then
# saving every *T* seconds costs this part of the time, to first order (J. W. Young, 1974): C / T for saving, and T / 2M for what is
# computed twice, since a failure comes in the middle of an interval on average. Here with C = 30 s and a failure a day:

# %%
C, M = 30, 24 * 3600
for minutes in (1, 5, 15, 30, 60, 180):
    T = 60 * minutes
    saving, twice = C / T, T / (2 * M)
    print(f"every {minutes:3} min: saving {saving:6.2%}   computed twice {twice:6.2%}   together {saving + twice:6.2%}")

# %% [markdown]
# ## Exercise: the best interval
#
# Write a function that gives the *T* with the smallest cost, in seconds. How far does it move if ten times as many GPUs fail ten times
# as often?


# %% tags=["exercise"]
def best_interval(seconds_to_save, seconds_between_failures): ...


check("failover.interval", best_interval)

# %% [markdown]
# ## Exercise: whole or not at all
#
# `write(path)` writes a checkpoint to a path, and may die half-way through it with an exception. Write `save_whole`, so that under
# `path` there is always a whole checkpoint: the new one, or, where writing failed, the one of before. What failed must still be heard of.


# %% tags=["exercise"]
def save_whole(write, path): ...


check("failover.whole", save_whole)

# %% [markdown]
# ## Exercise: bring your own group back
#
# Start a run of your own on two ranks, kill one of them after its second checkpoint and before its last step, and let the group
# come back and finish, with no more than 10 steps computed twice. Hand the run in.

# %% tags=["exercise"]
comeback = ...
check("failover.comeback", comeback)

# %% [markdown]
# ## What to take along
#
# - A checkpoint holds weights, optimizer state, step and random state; it is written under another name and renamed.
# - One rank saves what all have (DDP); every rank saves where each has a part (FSDP), and then all must call it.
# - torchrun starts *all* ranks anew; going on is the script's own work.
# - Another world size goes on with the same losses if the batch of all ranks together stays the same.
