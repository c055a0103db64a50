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
# torchrun restart the group, and resume with a different number of ranks. Then you find out how often a cluster fails,
# and what a checkpoint interval costs there. The cells of this lab compute for about 2 minutes on two cores.

# %%
import os
import random
import shutil
import signal
import statistics
import time

from labkit import Spec, check, excerpt, guess, pictures, place, run, show

failures = pictures.failures
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
# it too, and starts **all** ranks again, after a new rendezvous:

# %%
pictures.launching.restart(nodes=1, per_node=2)

# %% [markdown]
# Each of them is the same program, from its first line. Not torchrun but `resume` restores the training state:

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
    cost = failures.first_order_cost(60 * minutes, C, M)
    print(f"every {minutes:3} min: {cost:6.2%} of the time for saving and for steps that are computed twice")

# %% [markdown]
# ## Failures per day
#
# Is one failure per day much? Llama 3 405B had 466 interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024);
# OPT-175B about 105 in two months on 992 GPUs (Zhang et al. 2022). If failures are independent, a job with ten times as
# many GPUs has ten times as many.
#
# **Predict:** how many interruptions per day does each of these rates mean for 1,024 GPUs, and for 100,000? Which of
# the two clusters was more reliable, per GPU?

# %%
for observed in failures.PUBLISHED.values():
    for gpus in (8, 1024, 16_384, 100_000):
        hours = observed.between(gpus) / 3600
        print(f"rate of {observed.name:13} {gpus:7,} GPUs: {24 / hours:7.2f} per day, one every {hours:7,.1f} h")

# %% [markdown]
# **Goodput** is the fraction of time that ends up in the model: no saving, no waiting for a restart, no step that is
# computed twice. J. T. Daly (2006) has it for failures that come at random, also while a job saves or restarts.
#
# **Predict** for a checkpoint of 30 s and a restart of 5 minutes: is a job on 16,384 GPUs above 90 %? Does the best
# interval of 100,000 GPUs depend on how long a restart takes?

# %%
failures.intervals(saving=30, restart=300, clusters=[1024, 16_384, 100_000])

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# All of this is *modelled*. On 16,384 GPUs a failure comes every 2.8 hours; at best, with a checkpoint about every 13
# minutes, almost 90 % of the time ends up in the model. (Llama 3 reports more than 90 %.) On 100,000 GPUs a failure
# comes every 27 minutes, and almost a fifth of the time would be restarts alone.
#
# The best interval does not depend on the restart: every failure costs a whole one, however often you save. So there
# are three ways out: save faster ("asynchronous" checkpoints wait for a copy in memory only), restart faster, or do
# not restart ([lab 23](23_without_restart.py)).
#
# </details>
#
# **Try it:** the same with `saving=3`, and with `restart=30`. Which of the two gains more on 100,000 GPUs?
#
# ## Does the model hold?
#
# The next cell kills rank 1 three times, each time in a step that it draws: once in each third of the training.
# **Predict** how many steps are computed twice per failure on average, with a checkpoint every 50 steps.

# %% tags=["long"]
failing = run("ddp", **SAVING, steps=1200, max_restarts=3, sample_every=0)
killed = {None}
for third in range(3):
    planned = random.randrange(400 * third + 60, 400 * (third + 1))
    while failing.state.step < planned or failing.state.ranks[1].pid in killed:
        time.sleep(0.02)
    killed.add(failing.state.ranks[1].pid)
    os.kill(failing.state.ranks[1].pid, signal.SIGKILL)
print(failing.wait().words)

# %% tags=["long"]
rank = failing.state.ranks[0]
steps, times = [int(step) for step in rank.steps.step], list(rank.steps.t)
again = [index for index in range(1, len(steps)) if steps[index] <= steps[index - 1]]
twice = [steps[index - 1] - steps[index] + 1 for index in again]
restarts = [times[index] - times[index - 1] for index in again]
print(f"computed twice: {twice}, by the model 25 on average; restarts: {[f'{t:.1f} s' for t in restarts]}")
pauses = [(at, later - before) for at, before, later in zip(steps, times, times[1:])]
pauses = [pause for index, pause in enumerate(pauses, 1) if index not in again]
step = statistics.mean(pause for at, pause in pauses if at % 50)
saving = statistics.mean(pause for at, pause in pauses if at % 50 == 0) - step
print(f"a step takes {1e3 * step:.1f} ms, saving {1e3 * saving:.1f} ms more")
wall = times[-1] - times[0]
modelled = failures.goodput(50 * step, max(saving, 0), statistics.mean(restarts), wall / len(again))
print(f"goodput: measured {1200 * step / wall:.1%}, modelled {modelled:.1%}")

# %% [markdown]
# <details class="answer"><summary>Why they differ</summary>
#
# Three failures are few: each costs 0 to 49 steps, and the mean of three draws often misses 25 by 10. Goodput here
# depends on the restarts almost alone, because a step takes milliseconds and a restart seconds. The formula lets
# failures also come *during* a restart, and two failures in one restart cost less than two restarts. In this run each
# failure costs a whole one. So the model is too optimistic if restarts take a large part of the time between two
# failures, as here. On clusters they are short compared with it, and that makes no difference.
#
# </details>

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
# - Failures per day grow with the number of GPUs. The best interval is √(2·C·M), however long a restart takes.
# - With a different world size, training resumes with the same losses if the global batch size stays the same.
