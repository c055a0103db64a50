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
# # The input pipeline: is the device waiting for data, and does it get every sample once?
#
# A training run reaches half the speed that its GPU allows. Is it the model, the gradient communication, or the disk?
# Every step starts with a batch, and a device without a batch waits. In this lab you see that wait, hide it, and
# measure what each of the usual settings gains **on this machine**: workers, pinned memory, asynchronous copies. Then
# the data come in shard files, as in every large training: who reads which shard, and **where does a run continue that
# was interrupted in the middle of an epoch?** The cells of this lab compute for about 1 minute on two cores.

# %%
import inspect
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from labkit import Spec, check, diff_scripts, excerpt, guess, pictures, place, run, show, starter, write_script

HERE = place(2)
print(HERE)

# %% [markdown]
# ## Where a batch comes from
#
# These are the lines that change in the script when two workers load the data. Each rank executes them, so each rank
# has its own data loader.

# %%
diff_scripts(Spec(nproc=2), Spec(nproc=2, options={"workers": 2}))

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

# %% [markdown]
# ## Data in shards
#
# Each request to an object store, and each file that is opened on a network disk, has a latency, however small the file
# is. So large data sets are stored in *shards*: files with many samples each, which are read from front to back. The
# price: there is no cheap `dataset[i]`, so that no sampler can divide the samples. The data set itself must know who it
# is. Here are ten shards with 32 samples each; a sample is a number:

# %%
folder = tempfile.TemporaryDirectory()
for shard in range(10):
    np.save(Path(folder.name) / f"shard_{shard:04d}.npy", np.arange(32) + 100 * shard)

# %% [markdown]
# This cell writes `shard_stream.py` next to the notebook. Its data set is a stream: `__iter__` instead of
# `__getitem__`. A *shuffle buffer* stands for the sampler: it takes in 16 samples, and yields a random one of them.

# %%
script = starter("input_pipeline.loader")
import shard_stream

print(inspect.getsource(shard_stream.Stream))

# %% [markdown]
# ## Predict: who reads what?
#
# The script runs on two ranks with two workers each, and a batch size of 8. An epoch should have 320 samples. **Write
# down** for each value of `divided`: how often is a sample trained on in an epoch, and how many batches does each rank
# get? Ten shards for four workers do not come out even: what happens then?

# %%
TWO = {"nproc": 2, "device": "cpu", "sample_every": 0}
DIVIDED = ("nobody", "ranks", "workers")
streams = {divided: run(script, **TWO, args=[folder.name, divided]).wait() for divided in DIVIDED}


# %%
def got(divided):
    """What each of the two ranks wrote."""
    return [json.loads((Path(folder.name) / f"{divided}-{rank}.json").read_text()) for rank in range(2)]


print("divided by   batches per rank   different samples   times each   the run")
for divided, job in streams.items():
    epochs = [rank["epochs"][0] for rank in got(divided)]
    times = Counter(sample for epoch in epochs for batch in epoch for sample in batch)
    batches, often = str([len(epoch) for epoch in epochs]), str(sorted(set(times.values())))
    print(f"{divided:12} {batches:18}{len(times):18}   {often:12} {job.state.status.state}")

# %%
print(streams["workers"].words)

# %% [markdown]
# <details class="answer"><summary>What went wrong</summary>
#
# - **nobody**: each worker of each rank has a copy of the data set, and reads all of it: every sample 4 times. Nothing
#   fails, and what is called an epoch is four.
# - **ranks**: the data set divides the shards by rank, but the two workers of a rank still read the same: every sample
#   twice. `get_worker_info()` tells a worker who it is
#   ([PyTorch](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset)).
# - **workers**: right for 8 shards, or 12. Of 10, the workers of rank 0 get three each and those of rank 1 two: 24
#   batches and 16. An all-reduce does not know about epochs: rank 1 begins its second one, and its steps meet those of
#   rank 0's first. Nothing shows that, until rank 1 has made both epochs. Rank 0 has 16 steps left, and no peer: here
#   the connection closes when rank 1 ends; with NCCL, rank 0 waits until the timeout.
#
# So count first, from an index with the sizes of the shards, and give all ranks the same number of batches: **drop**
# the rest (other samples in each epoch), **repeat** some samples (the default of `DistributedSampler`), or draw shards
# **with replacement**, so that an epoch is a number of steps (`resampled=True` of WebDataset). `Join` of
# `torch.distributed.algorithms` lets ranks with fewer batches take part in the collectives of the others.
#
# </details>
#
# ## Three more faults in this script
#
# They stop no run. **Predict** before you run the cell: is the second epoch in the order of the first? Does worker 0 of
# rank 1 draw the random numbers of worker 0 of rank 0? And when a rank has trained on 48 samples, what is `position` in
# its process, and how many samples have its workers delivered?

# %%
first, second = got("ranks")
print("the two epochs have the same order:", first["epochs"][0] == first["epochs"][1])
print("first random number of workers 0 and 1: rank 0", first["random"], " rank 1", second["random"])
print("rank 0 after 6 steps:", first["look"])

# %% [markdown]
# <details class="answer"><summary>Why</summary>
#
# 1. Each epoch starts new workers with new copies of the data set, and `random.Random(1234)` begins again. The seed
#    must contain the **epoch**, which the trainer sets before each one, as with `set_epoch` of `DistributedSampler`.
#    With `persistent_workers=True` the copies stay, and do not see what the trainer sets. The order of the *shards*
#    must depend on the epoch too: a buffer of 16 mixes neighbours only.
# 2. A worker's seed is `base_seed + worker_id`, and each rank draws `base_seed` with its own generator. But all ranks
#    have called `torch.manual_seed(0)`, so that worker 0 augments equally on every rank. Give the loader
#    `generator=torch.Generator().manual_seed(seed + rank)`.
# 3. `position` is 0: only the copies in the workers count. And these are ahead: 2 workers × 2 batches
#    (`prefetch_factor`) × 8 samples have been delivered and wait in a queue. In addition, each worker has up to 16
#    samples in its buffer.
#
# </details>
#
# ## What a checkpoint of the loader holds
#
# A run that fails after these 6 steps, and resumes at the positions of its workers, **never** sees what they had
# prefetched. If it starts the epoch again, it sees 48 samples per rank **twice**. What counts is what has left the
# loader.
#
# | the state holds | without it |
# | --- | --- |
# | epoch and seed | every resume has the order of epoch 0 |
# | the position in each shard, of what the trainer got | samples twice, or never |
# | the shuffle buffer, and the state of its random numbers | a buffer of samples per worker: never |
# | the numbers of ranks and workers that the positions are of | divided in another way: twice, or never |
#
# Two designs keep it small. Either **the state travels with the batch**: a worker sends its own along, and the trainer
# stores the last one that it got from each. Or **the order is a function** of seed and epoch, for all samples: then the
# state says how far the training is, and any number of ranks can divide what is left (*elastic* resume).
#
# - [StatefulDataLoader](https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader/README.md) of
#   torchdata has the first design: it calls `state_dict()` of the data set in the workers, and without such a method it
#   counts batches and skips as many. It collects the states of a rank's workers, but not those of the ranks. On another
#   number of ranks or workers, a recipe of NVIDIA's
#   [starts its loader from scratch](https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1250), with a warning.
# - [MosaicML Streaming](https://docs.mosaicml.com/projects/streaming/en/latest/api_reference/generated/streaming.StreamingDataset.html)
#   has the second one: a checkpoint is `epoch`, `sample_in_epoch`, `shuffle_seed` and `num_canonical_nodes`.
# - [WebDataset](https://webdataset.github.io/webdataset/multinode/) divides whole tar files by node and worker. Its
#   author recommends [training without epochs](https://github.com/tmbdev/wds-distributed), so that a resume may begin
#   anywhere; then no sample is promised once.
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
# This cell writes `slow_input.py` next to the notebook: a plain DDP script whose data set takes 50 % longer than a
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
# ## Exercise: resume on another number of ranks
#
# Write the class. Each rank makes a `Loader(files, rank, ranks, workers, batch, seed)`. `files` has the number of
# samples by path, and `np.load(path)` gives them: int64, (samples, numbers). Ranks cannot talk to each other.
#
# - `__iter__` yields the batches of an epoch, or what is left of it after `load`; the next time, those of the next
#   epoch. A batch has `batch` whole samples: (batch, numbers).
# - `state()` may be called after any batch. What it returns must fit into JSON.
# - `load(states)` gets the states of **all** ranks of the interrupted run, which may have been more or fewer.
#
# The check draws shards, batch, workers and steps, and starts real processes. A first run is interrupted in its second
# epoch, when its workers have prefetched. A second run, on another number of ranks, goes on and is interrupted in the
# *same* epoch. A third one ends it, and makes another. It measures:
#
# - each sample once per epoch, over all runs; all ranks get the same number of batches. Only what does not fill a batch
#   on every rank may be dropped
# - another order in each epoch, of samples and of shards
# - the `workers` read, the rank does not; few workers open the same shard, and none holds more than 5 shards
# - the state: at most 1,000 bytes of JSON per rank


# %% tags=["exercise"]
class Loader:
    def __init__(self, files, rank, ranks, workers, batch, seed): ...

    def __iter__(self):
        # a DataLoader with workers, of an IterableDataset that you write
        ...

    def state(self): ...

    def load(self, states): ...


check("input_pipeline.loader", Loader)

# %% [markdown]
# ## Summary
#
# - Check the wait for **data** before you tune anything else. If it is close to zero, no setting of the loader helps.
# - Workers overlap loading with training; the step then takes the maximum of compute and load / workers. Their number
#   multiplies with the number of ranks, and they need cores.
# - Use `pin_memory` and `non_blocking` together. They need a GPU and save at most the time of the copy. A copy overlaps
#   with kernels only if it is on another stream.
# - A gain below the noise between two identical runs is not a gain.
# - A stream divides itself: shards by rank *and* worker, the same number of batches on every rank, another order in
#   each epoch, other random numbers in each worker.
# - A checkpoint of the loader says what the **trainer** has got, not what the workers have read. If the order of an
#   epoch is a function of seed and epoch, this is a few numbers, and any number of ranks can go on.
