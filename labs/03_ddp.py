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
# # DDP: equal ranks that average their gradients
#
# **Two processes train on different samples and never compare their weights. How do their models stay bitwise
# identical?**
#
# This lab takes forty minutes. You follow the four phases of a step, check the gradient average with numbers, see how
# the samples are distributed, and how the communication is overlapped. The cells of this lab compute for about 1
# minute on two cores.

# %%
from labkit import Spec, check, excerpt, guess, pictures, place, run, show

HERE = place(2)
# %load_ext labkit

# %% [markdown]
# ## A DDP step
#
# Once, at the start, rank 0 **broadcasts** its weights. Then, in every step, each rank does the same four things:
# **forward** on its own samples, **backward**, **all-reduce** of the gradients, and the **update**. (A model with
# *buffers*, such as the running statistics of batch norm, sends one thing more: before each forward, rank 0 broadcasts
# its buffers, unless `broadcast_buffers=False`. The statistics are those of rank 0's samples alone; `SyncBatchNorm`
# computes them over the samples of all ranks, with a collective in each layer.)

# %%
pictures.data_parallel.ddp_step(ranks=2)

# %% [markdown]
# **Predict:**
#
# 1. Which of these phases involve the other rank?
# 2. No weights are sent after the start. Why are they still equal after a thousand steps?
# 3. The arrows of ④ begin before backward is finished. How can a gradient be sent before all gradients are computed?
#
# <details class="answer"><summary>Answer</summary>
#
# 1: only ① and ④. 2: equal weights, updated with the same averaged gradient by the same rule, stay equal. 3: backward
# runs from the last layer to the first, and the gradients of the last layer are complete long before.
#
# </details>
#
# In the script this is one line. The rest of the step is the same as on one device:

# %%
excerpt(Spec(strategy="ddp", **HERE), "parallelize", "train_step")

# %% [markdown]
# ## The broadcast, with numbers
#
# In this section two ranks **stay** for several cells, with their variables: `%%torchrun 2 --keep` starts them, and
# `%%ranks` runs the next cell on them. So you can stop in the middle of a step and look at what each rank has.
#
# The model has two weights. Each rank deliberately initialises **different** weights: its seed is its rank.

# %%
# %%torchrun 2 --keep
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(rank)
layer = torch.nn.Linear(2, 1, bias=False).to(device)
layer.weight

# %% [markdown]
# **Predict:** which weights does rank 1 have after its model is wrapped?

# %%
# %%ranks
model = DistributedDataParallel(layer)
layer.weight

# %% [markdown]
# Both ranks have the weights of rank 0; those of rank 1 are overwritten.
#
# ## The average, with numbers
#
# The output is w₀·x₀ + w₁·x₁, and it is also the loss. So the gradient equals the input. Rank 0 has the sample (1, 2),
# rank 1 has (3, 6). The next cell leaves out the all-reduce with `no_sync()`. **Predict:** which gradient does each
# rank have?

# %%
# %%ranks
sample = torch.tensor([[1.0, 2.0]], device=device) * (1 + 2 * rank)
with model.no_sync():  # backward without the all-reduce
    model(sample).sum().backward()
local = layer.weight.grad.flatten()
local

# %% [markdown]
# `%ranks pull` fetches a variable from all ranks, as a list with one value per rank:

# %%
# %ranks pull local
pictures.data_parallel.average([gradient.tolist() for gradient in local])

# %% [markdown]
# **Predict** for both ranks: the gradient after a backward *with* the all-reduce, and the change of the weights with a
# learning rate of 0.1.

# %%
# %%ranks
model.zero_grad()
model(sample).sum().backward()
start = layer.weight.detach().clone()
torch.optim.SGD(model.parameters(), lr=0.1).step()
report(averaged=layer.weight.grad.flatten(), change=(layer.weight.detach() - start).flatten())

# %% [markdown]
# (1 + 3) / 2 = 2 and (2 + 6) / 2 = 4 on both ranks, and the weights change by −0.2 and −0.4 on both. **One** device
# computes the same gradient for the mean loss of both samples. So two ranks with 128 samples train like one with 256.
#
# **Think:** in the last step of an epoch, rank 0 has 3 samples and rank 1 has one. Is this the average over 4 samples?
#
# <details class="answer"><summary>Answer</summary>
#
# No. DDP averages over ranks, not over samples, so rank 1's single sample weighs as much as rank 0's three together.
# That is one reason why the sampler gives all ranks the same number of samples.
#
# </details>

# %% [markdown]
# ## What `no_sync` leaves
#
# If a batch does not fit, you split it into micro-batches, add up their gradients, and update once. Only the last
# backward needs an all-reduce. **Predict:** the first backward below is local, the second one is not. Which gradient
# does each rank have at the end, and does it contain the *local* gradient of the first?

# %%
# %%ranks
model.zero_grad()
with model.no_sync():
    model(sample).sum().backward()
print("after the first: ", layer.weight.grad.tolist())
model(10 * sample).sum().backward()
print("after the second:", layer.weight.grad.tolist())

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# (22, 44) on both ranks: the average of 1 + 10 and 3 + 30, and of twice that. DDP reduces what is in `.grad` *after*
# the second backward has added to it, so the local gradients of the first are averaged too. One all-reduce was enough
# for two micro-batches.
#
# </details>
#
# **Try it:** leave out `model.zero_grad()` and run the cell twice. Are the gradients of both ranks still equal in the
# end? And the weights, if you update after the *first* backward? `%ranks` shows what each rank has.
#
# The ranks hold their devices until they are stopped:

# %%
# %ranks stop

# %% [markdown]
# ## How 60,000 samples are split into batches
#
# **Predict:** with 128 samples per rank and step, how many steps does an epoch have on one device, on two, on four? How
# many samples does each step process?

# %%
for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", Spec(strategy="ddp", nproc=ranks).batch_sentence)

# %% [markdown]
# `batch_size` in a script is **per rank**. With two ranks, each takes 128 samples, not 64. A step processes 256
# samples, and 469 steps become 235. To keep the global batch size, divide it by the ranks (`scaling="strong"`):

# %%
for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", Spec(strategy="ddp", nproc=ranks, scaling="strong").batch_sentence)

# %% [markdown]
# Now run it and look at the loss. **Predict:** are the losses of the two ranks equal? And how many MiB does each rank
# send per step, with 405,898 parameters of 4 bytes? Replace the three dots; the run compares.

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step: all gradients out, and the average back
ddp = run("ddp", **HERE, steps=10)
show(ddp)

# %% [markdown]
# <details class="answer"><summary>Why do they differ if the models are equal?</summary>
#
# Each rank computes the loss of its own samples. The mean over the ranks is the loss of the step, and only the mean can
# be compared with the loss of a single device.
#
# </details>
#
# The gradients are all-reduced once: 4 bytes for each of 405,898 parameters. Each rank sends 2(n−1)/n times that.

# %%
ddp.wait().ledger()

# %%
my_guess

# %% [markdown]
# ## Which rank gets which samples
#
# `DistributedSampler` shuffles with the seed *seed + epoch*, which is the same on every rank, and assigns the samples
# to the ranks round-robin. Here are 20 samples, each with its number and the colour of its rank:

# %%
pictures.data_parallel.shares(samples=20, ranks=2, batch=5)

# %% [markdown]
# **Predict:** 22 samples cannot be divided evenly among four ranks. What happens to the remainder?

# %%
pictures.data_parallel.shares(samples=22, ranks=4, batch=3, epochs=1)

# %% [markdown]
# Two samples are used twice, so that all ranks do the same number of steps. If a rank did one step less, the others
# would wait in an all-reduce until its timeout (10 minutes with NCCL, 30 with gloo) ends the job. What happens if you
# forget the sampler? Or the call of `set_epoch`?

# %%
pictures.data_parallel.shares(sampler=False)

# %%
pictures.data_parallel.shares(set_epoch=False)

# %% [markdown]
# Without a sampler, every rank iterates over all samples, so an epoch takes as long as on one device. In our scripts
# all ranks have the same seed, so they also shuffle equally: both compute the same gradient, and averaging it changes
# nothing. With different seeds they draw different batches, and each sample is used once per rank. Without `set_epoch`,
# every epoch has the same order, so the batches contain the same samples in every epoch. **Neither raises an error**,
# and the loss still decreases. Would you notice?

# %%
for fault in ("no_sampler", "no_set_epoch"):
    broken = run("ddp", **HERE, workload="mlp", samples=1024, epochs=2, fault=fault).wait()
    print(f"{fault}: {broken.words} after {broken.state.step} steps\n{broken.findings()}\n")

# %% [markdown]
# Both runs *finished*. Without a sampler, two epochs took twice as many steps: 1,024 / 128 each instead of 1,024 / 256.
# The lab found this by comparing samplers and batches of the ranks. In your script, print each rank's first labels.

# %% [markdown]
# ## Buckets
#
# DDP does not send every gradient separately, because each message costs latency. Nor does it wait until all gradients
# are ready. It fills **buckets**, from the last layer to the first, and sends each bucket as soon as it is full.
#
# **Predict:** a GPT with 1,073,536 parameters has 4.1 MiB of gradients. How many buckets are there if each has 25 MiB?
# How much of the communication is overlapped with backward?

# %%
SETTING = {**HERE, "workload": "gpt", "batch_size": 4, "steps": 10}
my_guess = guess("overlapped_percent", ...)
coarse = run("ddp", **SETTING, options={"bucket_mb": 25}).wait()
coarse.figure("timeline")

# %%
my_guess

# %% [markdown]
# There is one bucket. It is full when the gradient of the *first* layer is ready, which is the end of backward. So it
# is sent when no computation is left to overlap with.
#
# By **default**, therefore, only the first bucket has 1 MiB, and the others have 25 MiB: communication starts early,
# and a large model still sends few messages. **Predict again:** how many buckets are there by default, and how many if
# each has 1 MiB? Take the backward time and the communication rate of that run, and model the timelines. A hook on each
# gradient puts it into its bucket; *Play* shows it:

# %%
ranks = coarse.summary()["ranks"]
backward = ranks[0]["phase_seconds"]["backward"]
sending = min(rank["communication"]["seconds"] for rank in ranks)  # of the rank that arrived last: it did not wait
pictures.data_parallel.buckets("gpt", bucket_mb=(25, 0, 1), backward=backward, rate=4 * 1_073_536 / sending, latency=0)

# %% [markdown]
# <details class="answer"><summary>Why four buckets and not five?</summary>
#
# 4.1 MiB would need five buckets of 1 MiB. But DDP closes a bucket when it *has reached* its size, not before it would
# exceed it. The tensor that fills the bucket belongs to it, so each bucket is slightly larger than 1 MiB.
#
# </details>
#
# Now the real runs:

# %%
default = run("ddp", **SETTING).wait()
fine = run("ddp", **SETTING, options={"bucket_mb": 1}).wait()
fine.figure("timeline")

# %%
for name, job in (("25 MiB", coarse), ("default", default), ("1 MiB", fine)):
    ranks, calls = job.summary()["ranks"], job.ledger()[0].calls
    overlapped = ", ".join(f"{rank['communication']['hidden']:.0%} on rank {rank['rank']}" for rank in ranks)
    backward = 1e3 * ranks[0]["phase_seconds"]["backward"]
    print(f"{name}: all-reduces per step: {calls:.0f}; overlapped: {overlapped}; backward {backward:.0f} ms")

# %% [markdown]
# Does the timeline look like the picture: the same number of buckets, with only the last one after backward? The
# durations may differ a lot if ranks share cores, because gloo's threads compute and send on the same cores. Also, a
# rank that is ahead **waits inside its all-reduce** for the other rank, so its communication looks longer: compare
# them.
#
# ### What is in a bucket
#
# A *communication hook* is called with each bucket when it is full, in place of DDP's own all-reduce. This one prints
# what is in the bucket, and then all-reduces it. The model has six layers of 0.34 MiB, and a bucket 0.6 MiB.


# %%
# %%torchrun 2 --keep
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def print_bucket(_, bucket):
    inside = ", ".join(names[parameter] for parameter in bucket.parameters())
    print(f"bucket {bucket.index()}: {bucket.buffer().nbytes / 2**20:.1f} MiB of {inside}")
    return allreduce_hook(None, bucket)


layers = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in range(6))).to(device)
names = {parameter: name for name, parameter in layers.named_parameters()}
model = DistributedDataParallel(layers, bucket_cap_mb=0.6)
model.register_comm_hook(None, print_bucket)

# %% [markdown]
# **Predict:** which weights are in bucket 0? The first backward, and then a second one:

# %%
# %%ranks
model(torch.randn(4, 300, device=device)).sum().backward()

# %%
# %%ranks
model(torch.randn(4, 300, device=device)).sum().backward()

# %%
# %ranks stop

# %% [markdown]
# <details class="answer"><summary>Why does the second backward differ?</summary>
#
# DDP cannot know in which order gradients become ready before it has seen a backward. So in the first step everything
# is in one bucket, and it notes the order. Then it builds the buckets for all later steps, from the last layer to the
# first: bucket 0 has layers 5 and 4. That is one reason why the first step of a run is slower, and why the lab leaves
# it out of its medians.
#
# </details>
#
# Is smaller always better? Each bucket costs latency: 2(n−1) messages in a ring. Predict the best size here, then
# measure it:

# %% tags=["long"]
for size in (1, 2, 4):
    job = run("ddp", **SETTING, options={"bucket_mb": size}).wait()
    rank = job.summary()["ranks"][0]
    milliseconds, overlapped = 1e3 * rank["step_seconds_median"], rank["communication"]["hidden"]
    print(f"{size} MiB: {milliseconds:.1f} ms per step, {overlapped:.0%} overlapped")

# %% [markdown]
# The CNN of the first run has 1.5 MiB of gradients: the first bucket contains all but 0.2 MiB of them. The default was
# chosen for large models: a GPT with ten million parameters has three buckets, one with 100 million about fifteen.

# %%
pictures.data_parallel.buckets("gpt", bucket_mb=(25, 0, 4), size="10M", backward=0.3)

# %% [markdown]
# ## Exercises
#
# **1.** 50,000 images, eight ranks, 96 images per rank and step: how many steps make an epoch, and how many images does
# each rank have in the last step? Answer with `(steps, images)`.

# %% tags=["exercise"]
steps_and_last = ...
check("ddp.steps", steps_and_last)


# %% [markdown]
# **2.** Write the sampler. `order` is the list of shuffled samples, the same on every rank. Return the samples of
# `rank`. Every sample must be used, and all ranks must get the same number of samples.


# %% tags=["exercise"]
def mine(order, rank, ranks): ...


check("ddp.sampler", mine)

# %% [markdown]
# **3.** Run DDP on two or more ranks, for at least 12 steps, with a global batch size of 24 and each sample used once
# per epoch. Each step must send its gradients in **three or four** all-reduces. Choose a workload and a bucket size.

# %% tags=["exercise"]
bucketed = ...
check("ddp.buckets", bucketed)
