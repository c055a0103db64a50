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
# # Without a restart: recovery within a step, and replicas that rarely meet
#
# On 100,000 GPUs something fails every half an hour ([lab 10](10_failover.py)). With a restart, all of them go back to
# the last checkpoint because of one. **Why should 99,999 GPUs stop at all? What would the others need to go on, and
# what would the one that comes back need?**
#
# In this lab you kill a replica twice: once with a restart, once in a training that goes on. Then you let replicas meet
# only every *H* steps (DiLoCo), which makes slow links and missing replicas bearable. The cells of this lab compute for
# about 2 minutes on two cores.

# %%
import inspect
import os
import signal
import tempfile
import time
from itertools import pairwise

from labkit import advise, check, guess, pictures, run, starter

# %% [markdown]
# ## Two ways to survive
#
# Three replicas train with data parallelism, and one of them is killed. **Predict** before you run the cell: which of
# the three has to do something in a restart, and which must do something if the others just go on?

# %%
pictures.failures.recovery(replicas=3)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# In a restart, every rank is terminated, starts Python and torch again, meets the others (*rendezvous*), and computes
# the steps since the checkpoint again. With recovery within a step, the others lose one attempt of a step. The replica
# that comes back needs what a checkpoint would give it, but of the *current* step: it gets it from a peer.
#
# </details>
#
# ## With a restart
#
# Three ranks, a checkpoint every 50 steps, and rank 1 is killed after step 80, as in lab 10.

# %%
THREE = {"nproc": 3, "device": "cpu", "workload": "mlp", "batch_size": 32, "sample_every": 0}
restarted = run("ddp", **THREE, samples=9600, steps=200, save_every=50, max_restarts=1)
while restarted.state.step < 80 and not restarted.state.over:
    time.sleep(0.02)
os.kill(restarted.state.ranks[1].pid, signal.SIGKILL)
print(restarted.wait().words)


# %%
def cost(job):
    """The longest time between two updates, in seconds, and the steps that a rank computed twice."""
    rank = job.state.ranks[0]
    steps, times = [int(step) for step in rank.steps.step], list(rank.steps.t)
    pause = max(later - before for before, later in pairwise(times))
    return pause, sum(max(0, before - later + 1) for before, later in pairwise(steps))


pause, twice = cost(restarted)
print(f"no update for {pause:.1f} s; {twice} steps computed twice, which are {3 * 32 * twice} samples")

# %% [markdown]
# ## Recovery within a step
#
# This cell writes `replica.py` next to the notebook. It is one replica, with the idea of
# [torchft](https://github.com/meta-pytorch/torchft) in about 250 lines and without the package. Each replica is a
# its own torchrun: otherwise torchrun would terminate the others. This is the heart of it:

# %%
script = starter("without_restart.recovery")
import replica

print(inspect.getsource(replica.train_step))

# %% [markdown]
# 1. `manager.quorum` asks a *lighthouse*, which knows who is alive. Why in every step?
# 2. When a peer has died, `all_reduce` raises. Why is it not enough to try again with the same group?
# 3. `manager.commit` is a vote. Why must a rank whose all-reduce succeeded ask the others before it updates?
# 4. Why does a replica that votes "no" leave the group first?
#
# <details class="answer"><summary>Answer</summary>
#
# 1. Replicas die and return at any time, and all of the group must have the same list of members, or they wait for
#    each other.
# 2. A process group has a fixed number of ranks and a connection to each. The new quorum gets a new group, which takes
#    milliseconds here: no process starts.
# 3. In a ring, one rank may have the sum already when another one fails. If only the first updates, the replicas differ
#    from then on, and nothing says so.
# 4. Its neighbour may wait for a message of it, not of the one that died. Leaving closes the connections, so that the
#    neighbour gets its error too. With NCCL, this is `abort`.
#
# </details>
#
# Now the same failure. The lighthouse runs in this notebook; each of the three jobs may restart its own rank once.
# **Predict** how long the survivors make no update, in seconds, and how many steps the killed replica misses.

# %%
folder = tempfile.TemporaryDirectory()
lighthouse = replica.Lighthouse(least=3)
alone = {"nproc": 1, "device": "cpu", "max_restarts": 1, "sample_every": 0}
jobs = [run(script, **alone, args=[str(lighthouse.port), folder.name, str(number)]) for number in range(3)]
while jobs[1].state.step < 60 and not jobs[1].state.over:
    time.sleep(0.02)
os.kill(jobs[1].state.ranks[0].pid, signal.SIGKILL)
for job in jobs:
    print(job.wait().words)

# %%
pause, twice = cost(jobs[0])
made = [len(job.state.ranks[0].steps.step) for job in jobs]
print(jobs[1].logs(rank=0))
print(f"updates made: {made}")
print(f"a survivor: no update for {pause:.2f} s, {twice} steps computed twice")
print(f"the killed replica: {made[0] - made[1]} steps missed, which are {32 * (made[0] - made[1])} samples")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The survivors pause for one attempt, not for a restart. The killed replica misses all steps that the others make
# meanwhile. These are many here, because a step takes milliseconds and Python seconds. But it is *its* samples only:
# one third of the batch, and on 1,000 replicas a thousandth.
#
# </details>
#
# **What it costs.** The batch is smaller while a replica is missing, so that this is not the same training as without a
# failure (torchft can also keep spare replicas, whose gradients count as zero). A replica that is split by FSDP or TP
# fails as a whole. The lighthouse must not fail. And a failure that repeats in the same step, such as NaN or a bug,
# kills every replica in turn: for that, and for a power failure, there are still checkpoints. torchft notices a death
# by missing heartbeats, and by timeouts: a GPU that hangs closes no connection.
#
# ## Exercise: what a failure costs
#
# Write `lost(replicas, samples, interval, restart, heal)`. Each of `replicas` trains `samples` per step. It returns two
# numbers of samples that are lost per failure on average: with a restart, with checkpoints every `interval` steps and a
# restart that takes as long as `restart` steps; and with recovery, if the replica is back after `heal` steps.


# %% tags=["exercise"]
def lost(replicas, samples, interval, restart, heal): ...


check("without_restart.samples", lost)

# %% [markdown]
# ## Replicas that rarely meet: DiLoCo
#
# Even without failures, replicas wait for each other in every step. DiLoCo (Douillard et al. 2023) lets each train
# alone for *H* steps with AdamW, the *inner* optimizer. Then it compares the point θ that all had in common with where
# each replica i has come, θᵢ. The mean of θ − θᵢ is a **pseudo-gradient**: an *outer* optimizer, SGD with Nesterov
# momentum, makes one step from θ with it, and all replicas continue there. The paper uses H = 500.
#
# **Predict:** how many bytes does a rank send per step, relative to DDP, with H = 5 and 25? Is the loss after the same
# number of samples lower than DDP's, equal, or higher?

# %%
my_guess = guess("sent_mb", ...)  # MiB that a rank sends per step under DDP
TEXT = {"nproc": 2, "device": "cpu", "workload": "gpt", "batch_size": 4, "steps": 75}
trained = {1: run("ddp", **TEXT).wait()}  # by H
my_guess

# %%
for every in (5, 25):
    trained[every] = run("diloco", **TEXT, options={"sync_every": every}).wait()


# %%
def loss(job):
    """The mean loss of the last 20 steps and all ranks."""
    last = [value for rank in job.state.ranks.values() for value in list(rank.steps.loss)[-20:]]
    return sum(last) / len(last)


for every, job in trained.items():
    sent = job.summary()["ranks"][0]["comm_bytes_per_step"] / 2**20  # in step 50, after which the replicas meet
    how = "DDP" if every == 1 else f"DiLoCo, H = {every}"
    print(f"{how:14} {sent:.2f} MiB per meeting, {sent / every:.2f} MiB per step; loss {loss(job):.3f} after 75 steps")

# %%
trained[25].figure("loss")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# 1/H of the bytes: a meeting sends as much as a step of DDP. The loss is that of a *different* training, and it may be
# lower than DDP's here: the outer momentum makes longer steps, and nobody has tuned DDP's learning rate for so few.
# One run of 75 steps with one seed decides nothing. The paper starts from a model that is trained already, goes on for
# tens of thousands of steps, and then finds DiLoCo about as good as training in step. All other strategies of this lab
# have the losses of a single device; DiLoCo is the one that does not.
#
# </details>
#
# ## What it means on slow links
#
# Two sites with 8 A100 each train a model of 350M parameters, with data parallelism between the sites. The step of one
# site is *modelled* as in [lab 19](19_clusters.py); so is the link, by its bandwidth alone. DDP gets all overlap that
# there can be, DiLoCo none. **Predict** from which H on the internet is as good as InfiniBand.

# %%
site = advise("350M", devices=8, machine="a100x8", batch=256, sequence=1024).to_json()["fits"][0]
compute = site["seconds_per_step"]
parameters = site["memory_bytes"]["parameters"] * site["shards"] / 2
links = {"InfiniBand, 8 × 200 Gbit/s": 200e9, "Ethernet, 10 Gbit/s": 1.25e9, "internet, 1 Gbit/s": 0.125e9}
print(f"modelled: a site computes {compute:.2f} s per step")
for name, bandwidth in links.items():
    meeting = 4 * parameters / bandwidth  # 2 (n − 1) / n of 4 bytes per parameter, with n = 2 sites
    steps = {"DDP": max(compute, meeting), **{f"H = {every}": compute + meeting / every for every in (10, 100, 500)}}
    print(f"{name:27} " + ", ".join(f"{how}: {seconds:.2f} s" for how, seconds in steps.items()))

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Over the internet, DDP waits 11 s for each half a second of computing. With H = 100 the waiting is a fifth of the
# time, with H = 500 it is 5 %. But all bytes still go at once: the link is idle for 500 steps, and then everybody waits
# for it. **Streaming DiLoCo** (Douillard et al. 2025) sends a *fragment* of the model at a time, each in a different
# step, while the replicas train on, in 4 bits per number: a much smaller peak, and hardly a wait.
#
# Replicas that rarely meet also make failures cheaper. A replica that dies loses its way since the last meeting, and
# the others notice at the next one: torchft combines both.
#
# </details>
#
# ## Exercise: the outer step of DiLoCo
#
# Write the class. `after_step()` is called after each step of the inner optimizer, which you never see; the parameters
# of the model are equal on all ranks when the object is created. The outer optimizer has the rate and the Nesterov
# momentum that are given. The check trains on three ranks with drawn samples, parameters, rates and *H*. It compares
# losses, final parameters and bytes of each step, and requires that replicas are equal *bit by bit* after a meeting.
#
# **Predict** which of these are wrong, and why: the pseudo-gradient θᵢ − θ; an outer optimizer that is created in each
# meeting; an all-reduce of the parameters, whose mean is then subtracted from θ.


# %% tags=["exercise"]
class DiLoCo:
    def __init__(self, model, every, rate, momentum): ...

    def after_step(self): ...


check("without_restart.diloco", DiLoCo)

# %% [markdown]
# ## Exercise: recovery within a step
#
# `replica.py` wastes work: when a peer dies, the survivors compute their gradients again. And it heals parameters and
# moments only. Write `recover(model, optimizer, backward, manager, step)`, which trains one step with all that are
# alive and returns the next step:
#
# - `backward(step)` computes the gradients of this rank's samples. A rank may call it **once per step**
# - `manager` is that of `replica.py`; `optimizer` is AdamW; `model` also has a **buffer**, which is a part of the state
# - all members of a quorum update with the mean over the quorum, after a vote, or none does
# - a rank that comes back has its own weights and begins with step 0. It gets the state of one peer, and is equal to it
#   bit by bit from its first update on. Nobody sends a state in any other step
#
# The check trains on three ranks. It kills one (a real SIGKILL) in a step that it draws, after backward and before the
# all-reduce, and brings it back, as a new process would, in another step that it draws.
#
# **Predict** what `parameter.grad` contains after an all-reduce that has failed.


# %% tags=["exercise"]
def recover(model, optimizer, backward, manager, step): ...


check("without_restart.recovery", recover)

# %% [markdown]
# ## Summary
#
# | | restart | recovery within a step | DiLoCo |
# | --- | --- | --- | --- |
# | who stops | all ranks | one replica | nobody waits for H steps |
# | state comes from | the last checkpoint | a live peer, in the current step | the common point of the last meeting |
# | lost per failure | half an interval and a restart, of all | samples of one replica | steps of one replica |
# | the same training as without a failure | yes | no: smaller batches | no: a different training anyway |
#
# A restart costs every GPU, so its cost grows with the cluster twice: more failures, and more that each of them stops.
