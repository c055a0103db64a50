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
# # The input pipeline: is the device waiting for data?
#
# A training run reaches half the speed that its GPU allows. Is it the model, the gradient communication, or the disk?
# Every step starts with a batch, and a device without a batch waits. In this lab you see that wait, hide it, and
# measure what each of the usual settings gains **on this machine**: workers, pinned memory, asynchronous copies. The
# cells of this lab compute for about 1 minute on two cores.

# %%
from pathlib import Path

from labkit import Spec, check, excerpt, guess, pictures, place, run, show, write_script

HERE = place(2)
print(HERE)

# %% [markdown]
# ## Where a batch comes from
#
# This is the function `load` of the script that the next runs use. Each rank calls it, so each rank has its own data
# loader.

# %%
excerpt(Spec(nproc=2, options={"workers": 2}), "load")

# %% [markdown]
# - `num_workers`: the number of processes that load batches in advance. With 0, the training process loads each batch
#   itself.
# - `prefetch_factor`: how many batches a worker loads in advance (default: 2).
# - `persistent_workers`: keep the workers from epoch to epoch. Otherwise each epoch starts them again.
# - `pin_memory`: put the batch into page-locked memory, which a GPU can read directly.
#
# ## Predict: workers
#
# Loading a batch takes 200 ms, training on it 100 ms. The picture is a model that contains only these two figures.

# %%
pictures.input_pipeline.workers(load=0.2, compute=0.1, counts=(0, 1, 2))

# %% [markdown]
# 1. Write down the step time with 0, 1, and 2 workers, as a formula of *load*, *compute* and *workers*.
# 2. What does a third worker gain here?
# 3. Why does the first batch arrive as late with workers as without?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Without workers: load **+** compute. With workers, both run in parallel, and the longer one determines the step:
#    the maximum of compute and load / workers.
# 2. Nothing: with two workers, loading already keeps up with training.
# 3. A single worker loads a batch. More workers load more batches per second, but no batch sooner.
#
# </details>
#
# ## Run: slow data loading
#
# This run is slow because of **fault injection**: its data set sleeps 200 ms before it returns a batch, like a slow
# network disk. The loader has no workers.

# %%
SLOW = {**HERE, "batch_size": 64, "samples": 4096, "steps": 10, "fault": "slow_loader"}
excerpt(Spec("ddp", **SLOW), "SlowDataset")

# %%
slow = {0: run("ddp", **SLOW)}
show(slow[0])

# %% [markdown]
# The first line names the finding, its evidence and the fix. *Where a step's time goes* shows it as **data**. Would you
# have noticed it from the loss, or from what the ranks print?
#
# This is one profiled step: first every rank waits, then the computation starts.

# %%
slow[0].figure("timeline")

# %% [markdown]
# ## Predict: the same with workers
#
# The script says how long loading takes. The rest of a step is compute, as measured here.


# %%
def milliseconds(job):
    """Medians over the steps of rank 0, in ms: of each phase, and of the whole step."""
    rank = job.summary()["ranks"][0]
    seconds = rank["phase_seconds"] | {"step": rank["step_seconds_median"]}
    return {name: 1e3 * each for name, each in seconds.items()}


baseline = milliseconds(slow[0])
load, compute = 200, baseline["step"] - baseline["data"]
pictures.input_pipeline.workers(load=load / 1000, compute=compute / 1000, counts=(0, 1, 2))

# %% [markdown]
# ## Run: one worker, two workers
#
# The script is the same except for one setting. The disk does not get faster; the workers wait for it instead of the
# training process.

# %%
print(f"load {load} ms, compute {compute:.0f} ms")
with_one = guess("step_ms", ...)
slow[1] = run("ddp", **SLOW, options={"workers": 1}).wait()
with_two = guess("step_ms", ...)
slow[2] = run("ddp", **SLOW, options={"workers": 2}).wait()

# %%
print(f"one worker:  {with_one}\ntwo workers: {with_two}")

# %%
print("workers   model   measured   waiting for data")
for workers, job in slow.items():
    model = max(compute, load / workers) if workers else load + compute
    took = milliseconds(job)
    print(f"{workers:7}{model:5.0f} ms{took['step']:8.0f} ms{took['data']:16.0f} ms")

# %% [markdown]
# <details class="answer"><summary>Why model and measurement differ</summary>
#
# Two workers cannot make a step shorter than compute. And compute is a median over a few steps, some of which may have
# been slow: on shared cores it varies from run to run.
#
# Sleeping uses no core, so these workers slow nothing down. Real workers decode and augment: they need cores, and if
# ranks train on the same cores, *compute* grows. A fast GPU is the opposite case: if compute takes 5 ms and loading 200
# ms, 40 workers would be needed to keep the GPU busy, and faster loading gains more than additional workers.
#
# </details>
#
# **Every rank has its own workers.** Eight ranks with four workers each are 40 processes. Count the cores before you
# choose the number of workers: start with the number of cores divided by the number of ranks, minus one for the rank
# itself. The time spent waiting for data shows whether that is enough.
#
# ## One setting at a time
#
# Here the digits are in memory, and no fault is injected. Each process has its own loader, so one rank is enough to
# measure it. Which of these changes will have a visible effect, and in which direction?
#
# | setting | what it changes |
# | --- | --- |
# | `fetch=batches` | index a whole batch at once; by default, samples are loaded one by one and collated |
# | `workers=2` | two processes load in advance; each batch must be transferred to the training process |
# | `pin_memory=false` | batches stay in pageable memory, which the GPU cannot read directly |
# | `non_blocking=false` | the program waits for each copy to the device |

# %%
ONE = {**place(1), "workload": "mlp", "batch_size": 256, "samples": 8192, "steps": 40}
SETTINGS = {
    "default": {},
    "fetch=batches": {"fetch": "batches"},
    "workers=2": {"workers": 2},
    "pin_memory=false": {"pin_memory": False},
    "non_blocking=false": {"non_blocking": False},
}
one = {name: run("single", **ONE, options=options).wait() for name, options in SETTINGS.items()}

# %%
print(f"median of {ONE['steps']} steps in ms, on {place(1)['device']}\n")
print(f"{'setting':20}{'data':>8}{'copy':>8}{'step':>8}{'data + copy, % of step':>28}")
for name, job in one.items():
    took = milliseconds(job)
    fraction = (took["data"] + took["copy"]) / took["step"]
    print(f"{name:20}{took['data']:8.2f}{took['copy']:8.2f}{took['step']:8.1f}{fraction:28.1%}")

# %% [markdown]
# <details class="answer"><summary>How to read it</summary>
#
# The last column is the fraction of a step that the input takes. It is the most that all settings together could gain
# here.
#
# **Without a GPU**, the last two rows run the same program as the first: there is no memory to pin and nothing to copy.
# Any difference between them is measurement noise, and a difference of that size in the other rows means nothing
# either. On CPU ranks, `pin_memory` and `non_blocking` gain nothing, whatever this table says.
#
# **With a GPU**, these two settings affect *copy*: check how much of a step it is before you expect a large gain.
#
# `fetch=batches` saves a little time per sample: it indexes the tensor of all images once per batch. `workers=2` may
# even *increase* the wait here: the data are already in memory, and a batch from another process must be transferred.
# Workers help if loading takes time.
#
# </details>
#
# A single run is a single measurement. This cell alternates the settings over three rounds, so that a slow phase of the
# machine affects all settings equally. It takes 10 to 20 seconds.

# %% tags=["long"]
rounds = [{name: run("single", **ONE, options=options).wait() for name, options in SETTINGS.items()} for _ in range(3)]
print(f"{'setting':20}{'ms per step, in three rounds':>34}")
for name in SETTINGS:
    print(f"{name:20}" + "".join(f"{milliseconds(each[name])['step']:12.1f}" for each in rounds))

# %% [markdown]
# ## What pinned memory and non_blocking do
#
# A GPU reads pinned memory directly. To copy from pageable memory, the driver first copies the batch to a pinned
# buffer, and the program waits. With both settings, the program only *enqueues* the copy and continues to launch the
# following work. The picture is a model of a step in which the program has about as much to do as the GPU.

# %%
pictures.input_pipeline.copies(fetch=0.003, launch=0.003, copy=0.001, compute=0.004)

# %% [markdown]
# How much can `non_blocking=True` gain at most? Set `compute` to 0.020 in the cell above, and look again.
#
# <details class="answer"><summary>Answer</summary>
#
# The time of the copy, and only if the program is the bottleneck and not the GPU. With a long `compute`, the GPU always
# has work in its queue, and the three variants differ only by the copy. Pinned memory has a cost too: it cannot be
# swapped out, and allocating it takes time.
#
# </details>
#
# **Not blocking is not the same as overlapping.** The picture shows one stream: the copy of a batch and the kernels of
# the step before it run one after another on the GPU, and only the *program* no longer waits. For a copy that runs
# *while* the GPU computes, enqueue it on a second stream:
#
# ```python
# copies = torch.cuda.Stream()
#
#
# def prefetched(loader):
#     """The batches of a loader that uses pin_memory=True, copied to the GPU one batch ahead."""
#     ready = None
#     for batch in loader:
#         with torch.cuda.stream(copies):
#             following = [tensor.to("cuda", non_blocking=True) for tensor in batch]
#         if ready is not None:
#             yield ready
#         torch.cuda.current_stream().wait_stream(copies)  # the next kernels wait for the copy
#         for tensor in following:
#             tensor.record_stream(torch.cuda.current_stream())  # the allocator must not reuse it earlier
#         ready = following
#     if ready is not None:
#         yield ready
# ```
#
# The copy of the next batch is enqueued before the step with the current batch is, so both run at the same time. It
# gains at most the time of the copy. This code needs a GPU and was not run for this page.
#
# ## Exercise: how many workers?
#
# Loading takes `load` seconds per batch, and training takes `compute` seconds. Write a function that returns the
# **smallest** `num_workers` with which no step except the first waits for data.


# %% tags=["exercise"]
def workers_needed(load, compute): ...


check("input_pipeline.workers", workers_needed)

# %% [markdown]
# ## Exercise: fix a script
#
# This cell writes `slow_input.py` next to the notebook: a plain DDP script whose data set takes 1.5 times as long as a
# step of the run above. Open it, and fix the loader so that training no longer waits. The disk must stay as slow as it
# is, and the ranks must process as many samples per step as before. Then check the run: `run("slow_input.py",
# **HERE).wait()`.

# %%
script, sleeps = write_script(Spec("ddp", **SLOW)), 1.5 * compute / 1000
Path("slow_input.py").write_text(script.replace("time.sleep(0.2)", f"time.sleep({sleeps:.4f})"))
print(f"slow_input.py: {1e3 * sleeps:.0f} ms to load a batch, {compute:.0f} ms to train on it")

# %% tags=["exercise"]
fixed = ...
check("input_pipeline.mend", fixed)

# %% [markdown]
# ## Summary
#
# - Check the wait for **data** before you tune anything else. If it is close to zero, no setting of the loader helps.
# - Workers overlap loading with training; the step then takes the maximum of compute and load / workers. Their number
#   multiplies with the number of ranks, and they need cores.
# - Use `pin_memory` and `non_blocking` together. They need a GPU and save at most the time of the copy. A copy overlaps
#   with kernels only if it is on another stream.
# - A gain below the noise between two identical runs is not a gain.
