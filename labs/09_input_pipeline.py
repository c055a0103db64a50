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
# A training runs at half the speed that its GPU could have. Is it the model, the exchange of gradients, or the disk? Every step
# begins with a batch, and a device that has none waits. In this lab you see that wait, hide it, and find out what each of the usual
# switches is worth **on this machine**: workers, pinned memory, copies that nobody waits for.

# %%
from pathlib import Path

from labkit import Spec, check, excerpt, pictures, place, run, show, write_script

HERE = place(2)
print(HERE)

# %% [markdown]
# ## Where a batch comes from
#
# This is `load` out of the script that the next runs use. Each rank calls it, and so each rank has a loader of its own.

# %%
print(excerpt(Spec(nproc=2, options={"workers": 2}), "load"))

# %% [markdown]
# - `num_workers`: processes that fetch batches ahead. With 0 the training process fetches a batch itself, when it needs it.
# - `prefetch_factor`: how many batches a worker may be ahead; 2, if nothing is said.
# - `persistent_workers`: they stay from epoch to epoch, where otherwise each epoch would start them anew.
# - `pin_memory`: the batch lies in memory that a GPU can read by itself.
#
# ## Predict: workers
#
# Fetching a batch takes 200 ms, training on it 100 ms. The picture is a model: it has these two figures and nothing of this machine.

# %%
pictures.input_pipeline.workers(load=0.2, compute=0.1, counts=(0, 1, 2))

# %% [markdown]
# 1. Write down how long a step takes with 0, with 1, and with 2 workers, as a formula of *load*, *compute* and *workers*.
# 2. What does a third worker bring here?
# 3. Why is the first batch as late with workers as without?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Without workers load **+** compute. With them the two go on side by side, and the longer one counts: the larger of compute and
#    load / workers.
# 2. Nothing: with two, fetching already keeps up with training.
# 3. A batch is fetched by one worker. Workers bring more batches in a second, not a batch sooner.
#
# </details>
#
# ## Run: data that come slowly
#
# This run is slow **on purpose**. Its data set sleeps 200 ms before it gives a batch, as a network disk might. The loader has no workers.

# %%
SLOW = {**HERE, "batch_size": 64, "samples": 4096, "steps": 14, "fault": "slow_loader"}
print(excerpt(Spec("ddp", **SLOW), "SlowDataset"))

# %%
slow = {0: run("ddp", **SLOW)}
show(slow[0])

# %% [markdown]
# The first line says what was found, by which evidence, and the way out; *Where a step's time goes* shows it, as **data**. Would you have
# seen it in the loss, or in what the ranks print?
#
# This is one step of it, closely: an empty stretch in which every rank waits, then the work.

# %%
slow[0].figure("timeline")

# %% [markdown]
# ## Predict: the same with workers
#
# How long the disk takes is known from the script. What is left of a step is compute, as it was measured here.


# %%
def milliseconds(job):
    """Medians over the steps of rank 0: of each phase, and of the whole step."""
    rank = job.summary()["ranks"][0]
    seconds = rank["phase_seconds"] | {"step": rank["step_seconds_median"]}
    return {name: 1e3 * each for name, each in seconds.items()}


alone = milliseconds(slow[0])
load, compute = 200, alone["step"] - alone["data"]
pictures.input_pipeline.workers(load=load / 1000, compute=compute / 1000, counts=(0, 1, 2))

# %% [markdown]
# ## Run: one worker, two workers
#
# The same script but for one setting. The disk does not get faster; somebody else waits for it.

# %%
for workers in (1, 2):
    slow[workers] = run("ddp", **SLOW, options={"workers": workers}).wait()

# %%
print("workers   predicted   measured   of it waiting for data")
for workers, job in slow.items():
    predicted = max(compute, load / workers) if workers else load + compute
    took = milliseconds(job)
    print(f"{workers:7}{predicted:9.0f} ms{took['step']:8.0f} ms{took['data']:18.0f} ms")

# %% [markdown]
# <details class="answer"><summary>Where prediction and measurement differ</summary>
#
# Two workers cannot bring a step below compute, and compute is a median of a few steps that may have been slow ones: on shared cores it
# differs from run to run.
#
# Sleeping costs no core, so these workers disturb nobody. Real workers decode and augment: they need cores, and where ranks train on the
# same cores, *compute* grows. A fast GPU is the other end: where compute takes 5 ms and loading 200, it would take 40 workers to keep it
# busy, and a faster way to load is worth more than workers.
#
# </details>
#
# **Every rank has workers of its own.** Eight ranks with four workers each are 40 processes. Count the cores before you count workers:
# the machine's cores divided by
# its ranks, less one for the rank itself, is where to begin, and the wait for data says whether it was enough.
#
# ## One switch at a time
#
# Here the digits lie in memory, and nothing is slow on purpose. A loader belongs to one process, so one rank is enough to measure it.
# Which of these changes will be seen, and in which direction?
#
# | setting | what it changes |
# | --- | --- |
# | `fetch=samples` | samples are taken one by one and put together, as most scripts do; `batches` takes a whole batch by its indices |
# | `workers=2` | two processes fetch ahead; what they fetch must come over to the training process |
# | `pin_memory=false` | batches stay in memory that the GPU cannot read by itself |
# | `non_blocking=false` | the program waits for each copy to the device |

# %%
ONE = {**place(1), "workload": "mlp", "batch_size": 256, "samples": 8192, "steps": 40}
SWITCHES = {
    "as it is": {},
    "fetch=samples": {"fetch": "samples"},
    "workers=2": {"workers": 2},
    "pin_memory=false": {"pin_memory": False},
    "non_blocking=false": {"non_blocking": False},
}
one = {name: run("single", **ONE, options=options).wait() for name, options in SWITCHES.items()}

# %%
print(f"median ms of {ONE['steps']} steps, on {place(1)['device']}\n")
print(f"{'switch':20}{'data':>8}{'copy':>8}{'step':>8}{'data and copy, of a step':>28}")
for name, job in one.items():
    took = milliseconds(job)
    share = (took["data"] + took["copy"]) / took["step"]
    print(f"{name:20}{took['data']:8.2f}{took['copy']:8.2f}{took['step']:8.1f}{share:28.1%}")

# %% [markdown]
# <details class="answer"><summary>How to read it</summary>
#
# The last column is what the input takes of a step. It is the most that all switches together could win here.
#
# **Without a GPU** the last two rows are the same program as the first: there is no memory to pin and nothing to copy. Whatever they
# differ by is the noise of this measurement, and no difference smaller than that says anything about the other rows either. On CPU
# ranks `pin_memory` and `non_blocking` are worth nothing, whatever this table says.
#
# **With a GPU** *copy* is what these two are about: look how much of a step it is before you expect much of them.
#
# `fetch=samples` costs a little for every sample. `workers=2` may *lengthen* the wait here: the data are in memory already, and a batch
# that comes from another process has a longer way than one that is cut out of a tensor. Workers pay where fetching takes time.
#
# </details>
#
# One run is one look. This cell takes three rounds in turn, so that a slow moment of the machine hits all switches alike. It takes
# a few minutes.

# %% tags=["long"]
rounds = [{name: run("single", **ONE, options=options).wait() for name, options in SWITCHES.items()} for _ in range(3)]
print(f"{'switch':20}{'ms a step, in three rounds':>34}")
for name in SWITCHES:
    print(f"{name:20}" + "".join(f"{milliseconds(each[name])['step']:12.1f}" for each in rounds))

# %% [markdown]
# ## What pinned memory and non_blocking do
#
# A GPU fetches from pinned memory by itself. Out of other memory the driver first copies the batch to a pinned place of its own, and
# meanwhile the program waits. With both switches the program only *asks* for the copy, and goes on to launch the work that follows. The
# picture is a model of a step whose program has about as much to do as its GPU.

# %%
pictures.input_pipeline.copies(fetch=0.003, launch=0.003, copy=0.001, compute=0.004)

# %% [markdown]
# What is gained at the most by `non_blocking=True`? Make `compute` 0.020 in the cell above, and look again.
#
# <details class="answer"><summary>Answer</summary>
#
# The time of the copy, and only where the program is what holds up the GPU. With a long `compute` the GPU always has work queued, and the
# three ways differ by the copy alone. Pinned memory is not free either: it cannot be swapped out, and making it takes time.
#
# </details>
#
# ## Exercise: how many workers?
#
# Loading takes `load` seconds a batch, training `compute` seconds. Write a function that gives the **smallest** `num_workers` with which
# no step waits for data, but for the first.


# %% tags=["exercise"]
def workers_needed(load, compute): ...


check("input_pipeline.workers", workers_needed)

# %% [markdown]
# ## Exercise: mend a script of your own
#
# This writes `slow_input.py` beside the notebook: a plain DDP script whose data set takes half as long again as a step of the run above.
# It is yours now. Open it, and mend the loader so that training no longer waits. The disk stays as slow as it is, and the ranks
# train on as many samples a step as before. Then hand in the run: `run("slow_input.py", **HERE).wait()`.

# %%
script, sleeps = write_script(Spec("ddp", **SLOW)), 1.5 * compute / 1000
Path("slow_input.py").write_text(script.replace("time.sleep(0.2)", f"time.sleep({sleeps:.4f})"))
print(f"slow_input.py: {1e3 * sleeps:.0f} ms to fetch a batch, {compute:.0f} ms to train on it")

# %% tags=["exercise"]
mended = ...
check("input_pipeline.mend", mended)

# %% [markdown]
# ## What to take along
#
# - Look at the wait for **data** before anything else is tuned. If it is near nothing, no switch of the loader helps.
# - Workers hide loading, up to the larger of compute and load / workers; they multiply with the ranks and need cores.
# - `pin_memory` and `non_blocking` go together, need a GPU, and save at most the copy.
# - A gain that is smaller than the noise between two equal runs is no gain.
