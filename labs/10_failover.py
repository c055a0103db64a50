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
# # Failover: a rank dies, and the training continues
#
# A two-day job on 64 GPUs dies in its 47th hour, because one of 64 processes was killed. How much of the training is
# lost? Everything since the last checkpoint. In this lab you read what a checkpoint must contain, kill a rank, watch
# torchrun restart the group, and resume with a different number of ranks. The cells of this lab compute for about 1
# minute on two cores.

# %%
import os
import shutil
import signal
import time

from labkit import Spec, check, excerpt, guess, place, run, show

HERE = place(2)
SAVING = {**HERE, "workload": "mlp", "batch_size": 128, "scaling": "strong", "samples": 12_800, "save_every": 50}
print(HERE)

# %% [markdown]
# ## What a checkpoint contains
#
# This is how a rank of the DDP script saves:

# %%
excerpt(Spec("ddp", **SAVING), "save")

# %% [markdown]
# 1. Every rank calls `save`, and all ranks except rank 0 return before the file is written (`IS_LOGGING_RANK` is true
#    only on rank 0). Why is one rank enough, and what would happen if all of them wrote?
# 2. Why `getattr(model, "module", model)`?
# 3. Why is the file written under a temporary name first and then renamed?
# 4. Why are the model's weights not enough?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Under DDP all ranks have the same model and the same optimizer state, so a second copy is redundant. If all ranks
#    wrote to one file, it would contain the data of the last writer, or a mixture of several.
# 2. DDP wraps the model, and its names start with `module.`. Saved without the wrapper, the checkpoint is that of a
#    single device, and any number of ranks can load it.
# 3. A rank that dies while it writes leaves an incomplete file. `replace` is atomic: under the final name there is a
#    complete checkpoint or none. `fsync` comes first: without it, a power failure after the rename can leave a file
#    whose name is on the disk and whose contents are not.
# 4. AdamW stores two moments per weight; without them, the next steps are different. The step says how much of the data
#    has been used and which learning rate comes next, and the random state of *every* rank determines what dropout
#    draws next: `progress` collects both, and in fp16 the state of the `GradScaler`. Larger programs save more: the
#    state of a learning-rate scheduler, or of a data loader, that does not follow from the step.
#
# </details>
#
# ## Predict: how large is it?
#
# The model has 669,706 parameters of 4 bytes, and AdamW stores two more numbers for each. How many MB does a checkpoint
# have?

# %%
mine = 2.7  # MB: replace it by your prediction

# %% [markdown]
# ## Run: kill a rank
#
# The run has 200 steps, a checkpoint every 50 steps, and `max_restarts=1`: torchrun may restart the group once. The
# next cell waits for step 80 and then kills rank 1 with SIGKILL, as the kernel does when memory runs out. **SIGKILL is
# deliberate**: the rank gets no chance to clean up.
#
# Predict: does rank 0 survive? From which step does the group resume? How many steps are computed twice?

# %%
job = run("ddp", **SAVING, steps=200, max_restarts=1, sample_every=0)
while job.state.step < 80 and not job.state.over:
    time.sleep(0.02)
os.kill(job.state.ranks[1].pid, signal.SIGKILL)

# %%
show(job)

# %% [markdown]
# The surviving rank cannot continue: its next all-reduce blocks on a peer that no longer exists. So torchrun terminates
# it too, and starts **all** ranks again: the same program, from its first line. Not torchrun but `resume` restores the
# training state:

# %%
excerpt(Spec("ddp", **SAVING), "intact", "resume")

# %%
print(job.logs(rank=0).replace(str(job.folder.path), "…"))
rank = job.state.ranks[0]
last, first = int(rank.steps.step[rank.first_step - 1]), int(rank.steps.step[rank.first_step])
print(f"restarts: {job.summary()['restarts']}; failed after step {last}, resumed at step {first}")
print(f"steps computed twice: {last - first + 1}")

# %% [markdown]
# <details class="answer"><summary>What it cost</summary>
#
# The steps since the last checkpoint, and a restart: Python, torch, the rendezvous, the data. In a small job the
# restart is most of the cost. On many devices the lost steps are, because every device computes them again.
#
# </details>
#
# Was the predicted size right?

# %%
newest = max(job.folder.checkpoints.glob("step*"))
written = sum(file.stat().st_size for file in newest.iterdir()) / 1e6
print(f"{newest.name}: you predicted {mine:.2f} MB; it is {written:.2f} MB ({mine / written - 1:+.0%})")
print(f"three numbers of 4 bytes per parameter are {669_706 * 4 * 3 / 1e6:.2f} MB")

# %% [markdown]
# ## Resume with a different number of ranks
#
# The checkpoint contains the whole state, as a single device would save it, so any number of ranks can load it. Resume
# from step 100 with four ranks. With `scaling="strong"` the global batch size stays at 128, so each of the four ranks
# takes 32 samples.
#
# Predict: will the losses of steps 101 to 200 be identical, nearly identical, or different?

# %%
shutil.rmtree("step100", ignore_errors=True)
shutil.copytree(job.folder.checkpoints / "step00000100", "step100")
four = run("ddp", **{**SAVING, **place(4)}, steps=200, resume="step100", sample_every=0).wait()
print(four.words)


# %%
def losses(job):
    """The mean loss over all ranks, by step; for a step that was computed twice, the second value."""
    each = [dict(zip(map(int, rank.steps.step), rank.steps.loss)) for rank in job.state.ranks.values()]
    return {step: sum(one[step] for one in each) / len(each) for step in each[0]}


before, after = losses(job), losses(four)
for step in (101, 102, 105, 110, 120, 150, 200):
    difference = abs(after[step] - before[step]) / before[step]
    print(
        f"step {step}: two ranks {before[step]:.6f}, four ranks {after[step]:.6f}, relative difference {difference:.0e}"
    )

# %% [markdown]
# <details class="answer"><summary>Why they agree at first and differ later</summary>
#
# The same 128 samples give the same mean gradient, whichever ranks compute it. Sums of 32-bit numbers in a different
# order differ in the last digits, and with AdamW this difference grows from step to step. With `scaling="weak"`, four
# ranks would process 512 samples per step: a different training, with fewer steps per epoch, and probably with a
# different learning rate.
#
# </details>
#
# ## When every rank saves
#
# Under FSDP no rank has the whole model. Gathering it on rank 0 would need the memory that sharding saves. So every
# rank writes its shards, and a small index says which file contains what:

# %%
excerpt(Spec("fsdp2", **SAVING), "tensors_of", "save", "commit", "publish")

# %% [markdown]
# Which lines run on every rank, and which only on rank 0? What is the barrier for?
#
# <details class="answer"><summary>Answer</summary>
#
# `dcp.save` is a collective: all ranks must call it, or the others wait. When all shards are written, rank 0 renames
# the folder to its final name. The barrier keeps the other ranks from the next steps until it has done so.
#
# </details>
#
# This run saves with two ranks and resumes with one. Two shards must become one whole: `dcp.load` reads the shards that
# a rank needs.

# %% tags=["long"]
halves = run("fsdp2", **SAVING, steps=50).wait()
for file in sorted(max(halves.folder.checkpoints.glob("step*")).iterdir()):
    print(f"{file.name:16} {file.stat().st_size / 1e6:6.2f} MB")
whole = run("fsdp2", **{**SAVING, **place(1)}, steps=80, resume=halves.name)
show(whole)

# %% [markdown]
# ## What restarts do not fix
#
# The next run may also restart once, but **fault injection** kills its rank 1 at step 5, every time. Predict what
# happens, how many of the 200 steps it finishes in the end, and what its checkpoints, one every 50 steps, are good for.

# %%
my_guess = guess("steps", ...)
again = run("ddp", **SAVING, steps=200, max_restarts=1, fault="killed_rank").wait()
print(f"{again.words}; restarts: {again.summary()['restarts']}")
again.findings()

# %%
my_guess

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Every start reaches step 5 and fails there, and no checkpoint is ever written. Restarts help against transient
# failures: a machine or a link that fails, or another process that used up the memory. A failure that repeats at the
# same step is not transient, and each restart only adds to the cost. So `max_restarts` is small in practice, and the
# *first* failure is the one to read.
#
# </details>
#
# ## How often to save
#
# Saving costs time, and so do lost steps. Suppose a checkpoint takes *C* seconds, and there is a failure every *M*
# seconds on average. Then saving every *T* seconds costs, to first order (J. W. Young, 1974), the fraction C / T of the
# time for saving, and T / 2M for steps that are computed twice, because a failure comes in the middle of an interval on
# average. Here with C = 30 s and one failure per day:

# %%
C, M = 30, 24 * 3600
for minutes in (1, 5, 15, 30, 60, 180):
    T = 60 * minutes
    saving, twice = C / T, T / (2 * M)
    print(f"every {minutes:3} min: saving {saving:6.2%}   computed twice {twice:6.2%}   total {saving + twice:6.2%}")

# %% [markdown]
# ## Exercise: the best interval
#
# Write a function that returns the *T* with the lowest cost, in seconds. How does it change if ten times as many GPUs
# fail ten times as often?


# %% tags=["exercise"]
def best_interval(seconds_to_save, seconds_between_failures): ...


check("failover.interval", best_interval)

# %% [markdown]
# ## Exercise: an atomic save
#
# `write(path)` writes a checkpoint to a path and may fail half-way with an exception. Write `save_whole` so that `path`
# always contains a complete checkpoint: the new one, or the previous one if writing failed. The exception must still
# reach the caller.


# %% tags=["exercise"]
def save_whole(write, path): ...


check("failover.whole", save_whole)

# %% [markdown]
# ## Exercise: recover from a killed rank
#
# Start a run on two ranks, kill one of them after its second checkpoint and before its last step, and let the group
# restart and finish, with at most 10 steps computed twice. Your answer is the run.

# %% tags=["exercise"]
comeback = ...
check("failover.comeback", comeback)

# %% [markdown]
# ## Summary
#
# - A checkpoint contains weights, optimizer state, step and random state; with fp16 also the state of the scaler, with
#   a schedule that of the scheduler. It is written under a temporary name, flushed to the disk, and then renamed.
# - If all ranks have the same state (DDP), one rank saves it. If each rank has a shard (FSDP), every rank must call the
#   save function.
# - torchrun restarts *all* ranks. Resuming is the job of the script.
# - With a different world size, training resumes with the same losses if the global batch size stays the same.
