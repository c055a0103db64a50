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
# **Two processes train on different samples, and never look at each other's weights. How do their models stay equal to the
# last bit?**
#
# Forty minutes: the four moments of a step, the average with its numbers on screen, whose the samples are, and how the
# sending is hidden.

# %%
from labkit import Spec, check, excerpt, pictures, place, run, show

HERE = place(2)
# %load_ext labkit

# %% [markdown]
# ## A step of DDP
#
# Once, at the start, rank 0 **broadcasts** its weights. Then, at every step, each rank does the same four things: **forward**
# on samples of its own, **backward**, **all-reduce** of the gradients, and the **update**.

# %%
pictures.data_parallel.ddp_step(ranks=2)

# %% [markdown]
# **Predict:**
#
# 1. Which of these moments need the other rank?
# 2. Nobody sends weights after the start. Why are they equal after a thousand steps?
# 3. The arrows of ④ begin before backward is over. How can a gradient be sent before all are there?
#
# <details class="answer"><summary>Answer</summary>
#
# 1: only ① and ④. 2: equal weights, less the same averaged gradient, by the same rule, are equal weights. 3: backward goes
# from the last layer to the first; the last layer's gradients are complete long before the first one's.
#
# </details>
#
# In the script that is one line. All else of the step is as on one device:

# %%
print(excerpt(Spec(strategy="ddp", **HERE), "parallelize", "train_step"))

# %% [markdown]
# ## The broadcast, with its numbers
#
# A model of two weights. Each rank draws **others**, on purpose: the seed is its rank. **Predict:** what does rank 1 have
# after it was wrapped?

# %%
# %%torchrun 2
torch.manual_seed(rank)
layer = torch.nn.Linear(2, 1, bias=False).to(device)
report(drawn=layer.weight.flatten())
torch.nn.parallel.DistributedDataParallel(layer)
report(after_wrapping=layer.weight.flatten())

# %% [markdown]
# ## The average, with its numbers
#
# The output is w₀·x₀ + w₁·x₁, and that is the loss as well. So the gradient is the input itself. Rank 0 has the sample (1,
# 2), rank 1 has (3, 6).
#
# **Predict** for both ranks: the own gradient, the gradient after the all-reduce, and by how much the weights change at a
# learning rate of 0.1.

# %%
# %%torchrun 2 --as seen
layer = torch.nn.Linear(2, 1, bias=False).to(device)
model = torch.nn.parallel.DistributedDataParallel(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sample = torch.tensor([[1.0, 2.0]], device=device) * (1 + 2 * rank)
with model.no_sync():  # backward without the all-reduce
    model(sample).sum().backward()
report(own=layer.weight.grad.flatten())
optimizer.zero_grad()
model(sample).sum().backward()
start = layer.weight.detach().clone()
optimizer.step()
report(averaged=layer.weight.grad.flatten(), change=(layer.weight.detach() - start).flatten())

# %%
pictures.data_parallel.average(seen["own"])

# %% [markdown]
# (1 + 3) / 2 = 2 and (2 + 6) / 2 = 4, on both ranks; the weights change by −0.2 and −0.4 on both. It is the gradient that
# **one** device would have found for the mean loss of both samples. So two ranks with 128 samples each train as one device
# with 256.
#
# **Think:** in the last step of an epoch rank 0 has 3 samples and rank 1 has one. Is the average still that of one device
# with 4 samples?
#
# <details class="answer"><summary>Answer</summary>
#
# No. DDP averages over ranks and not over samples, so rank 1's single sample weighs as much as three of rank 0's. That is one
# reason why the sampler gives all ranks equally many.
#
# </details>

# %% [markdown]
# ## How a batch and 60,000 samples divide
#
# **Predict:** 128 samples a rank at a step. How many steps has an epoch on one device, on two, on four? How many samples does
# each step learn from?

# %%
for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", Spec(strategy="ddp", nproc=ranks).batch_sentence)

# %% [markdown]
# `batch_size` in a script is **per rank**. With two ranks each takes 128, not 64; the step learns from 256, and 469 steps
# become 235. To keep the step what it was, divide the batch yourself (here: `scaling="strong"`):

# %%
for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", Spec(strategy="ddp", nproc=ranks, scaling="strong").batch_sentence)

# %% [markdown]
# Now run it, and look at the loss. **Predict:** are the two ranks' losses equal?

# %%
ddp = run("ddp", **HERE, steps=30)
show(ddp)

# %% [markdown]
# <details class="answer"><summary>Why do they differ, if the models are equal?</summary>
#
# Each rank's loss is that of its own samples. Their mean is the loss of the step, and only the mean is comparable with one
# device's.
#
# </details>
#
# One all-reduce, and as many bytes as there are gradients: 4 bytes for each of 405,898 parameters, 2(n−1)/n times from each
# rank.

# %%
ddp.wait().ledger()

# %% [markdown]
# ## Whose the samples are
#
# `DistributedSampler` shuffles by *seed + epoch*, the same on every rank, and deals the samples out in turns. Here are 20
# samples; each has its number and colour:

# %%
pictures.data_parallel.shares(samples=20, ranks=2, batch=5)

# %% [markdown]
# **Predict:** 22 samples on four ranks do not divide. What becomes of the rest?

# %%
pictures.data_parallel.shares(samples=22, ranks=4, batch=3, epochs=1)

# %% [markdown]
# Two samples are taken twice, so that all ranks make equally many steps. A rank with one step less would leave the others
# waiting in an all-reduce, for ever. What if the sampler is forgotten? And if nobody calls `set_epoch`?

# %%
pictures.data_parallel.shares(sampler=False)

# %%
pictures.data_parallel.shares(set_epoch=False)

# %% [markdown]
# Without a sampler both ranks do the same work: the average of two equal gradients is one of them, and an epoch takes as long
# as on one device. Without `set_epoch` every epoch has the same order, so the same samples always meet in a batch. **Neither
# raises an error**, and the loss falls all the same. Would you notice?

# %%
for fault in ("no_sampler", "no_set_epoch"):
    broken = run("ddp", **HERE, samples=1024, epochs=2, fault=fault).wait()
    print(f"{fault}: {broken.words} after {broken.state.step} steps\n{broken.findings()}\n")

# %% [markdown]
# Both runs *finished*. Without a sampler two epochs took twice as many steps: 1,024 / 128 each, and not 1,024 / 256. The lab
# found it by what the samplers and the batches of the ranks had in common. In a script of your own, print the first labels of
# each rank once.

# %% [markdown]
# ## Buckets
#
# DDP does not send every gradient by itself, since each message costs its latency. Nor does it wait for all of them. It fills
# **buckets**, from the last layer to the first, and sends each one as soon as it is full: 25 MiB, if nothing is said.
#
# **Predict:** a GPT of 1,073,536 parameters has gradients of 4.1 MiB. How many buckets are there at 25 MiB? How much of the
# sending is hidden behind backward?

# %%
coarse = run("ddp", **HERE, workload="gpt", batch_size=4, steps=16).wait()
coarse.figure("timeline")

# %% [markdown]
# One bucket: it is full when the *first* layer's gradient is there, and that is the end of backward. So it is sent when
# nothing is left to compute. **Predict again:** how many buckets at 1 MiB? Take the time of backward and the speed of sending
# from that run, and have the timeline modelled:

# %%
ranks = coarse.summary()["ranks"]
backward = ranks[0]["phase_seconds"]["backward"]
sending = min(rank["communication"]["seconds"] for rank in ranks)  # of the rank that came last: it waited for nobody
pictures.data_parallel.buckets("gpt", bucket_mb=(25, 1), backward=backward, rate=4 * 1_073_536 / sending, latency=0)

# %% [markdown]
# <details class="answer"><summary>Four buckets, and not five?</summary>
#
# 4.1 MiB would need five of 1 MiB. But a bucket is closed when it *is* full, not before it would be too full: the tensor that
# fills it goes with it, so each has a bit more than 1 MiB.
#
# </details>
#
# And for real:

# %%
fine = run("ddp", **HERE, workload="gpt", batch_size=4, steps=16, options={"bucket_mb": 1}).wait()
fine.figure("timeline")

# %%
for name, job in (("25 MiB", coarse), ("1 MiB", fine)):
    ranks, calls = job.summary()["ranks"], job.ledger()[0].calls
    hidden = ", ".join(f"{rank['communication']['hidden']:.0%} on rank {rank['rank']}" for rank in ranks)
    print(f"{name}: all-reduces a step: {calls:.0f}; hidden: {hidden}; backward {1e3 * ranks[0]['phase_seconds']['backward']:.0f} ms")

# %% [markdown]
# Does the timeline have the form of the picture: as many buckets, and only the last one outside of backward? The lengths may
# differ much where ranks share cores: gloo's threads compute and send on the same cores. And a rank that is ahead **waits
# inside its all-reduce** for the other, so its sending looks longer: compare the two ranks' lanes.
#
# Is smaller always better? Each bucket costs its latency, 2(n−1) messages in a ring. Try to find the best size for your
# machine, and say first what you expect:

# %% tags=["long"]
for size in (1, 2, 4):
    job = run("ddp", **HERE, workload="gpt", batch_size=4, steps=16, options={"bucket_mb": size}).wait()
    rank = job.summary()["ranks"][0]
    print(f"{size} MiB: {1e3 * rank['step_seconds_median']:.1f} ms a step, {rank['communication']['hidden']:.0%} hidden")

# %% [markdown]
# The CNN of the run above has 1.5 MiB of gradients. It goes out in one bucket, and hides nothing. Large models are what 25
# MiB were chosen for: a GPT of ten million parameters has two buckets, and of a hundred million about fifteen.

# %%
pictures.data_parallel.buckets("gpt", bucket_mb=(25, 4), size="10M", backward=0.3)

# %% [markdown]
# ## Exercises
#
# **1.** 50,000 images, eight ranks, 96 images a rank at a step: how many steps make an epoch, and how many images has each
# rank in the last one? Answer `(steps, images)`.

# %% tags=["exercise"]
steps_and_last = ...
check("ddp.steps", steps_and_last)


# %% [markdown]
# **2.** Write the sampler: `order` is the list of shuffled samples, the same on every rank. Give those that `rank` takes.
# Every sample must be taken, and all ranks must take equally many.


# %% tags=["exercise"]
def mine(order, rank, ranks): ...


check("ddp.sampler", mine)

# %% [markdown]
# **3.** Make a run of DDP on two ranks or more, of 12 steps at least, that learns from 192 samples in all at a step, each
# taken once. Its gradients go out in **at least two and at most four** all-reduces a step. Take the workload that you like.

# %% tags=["exercise"]
bucketed = ...
check("ddp.buckets", bucketed)
