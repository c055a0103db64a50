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
# # Data parallel: one process for all devices
#
# **One line, `nn.DataParallel(model)`, and all GPUs work. Why does its own documentation tell you not to use it?**
#
# Half an hour: what DP sends at every step, what device 0 has to carry, what the threads wait for, and how DDP does the same
# without.

# %%
import time
from concurrent.futures import ThreadPoolExecutor

from labkit import Spec, check, compare, excerpt, pictures, place, run, show

HERE = place(2)
print(HERE)

# %% [markdown]
# With two GPUs or more you will run `nn.DataParallel` itself. Without, DP is **emulated**: a device is a thread of one CPU
# process, and what is sent between devices is copied within memory. The order of things, the work of device 0 and the one
# Python interpreter for all are as in the real one; the time that a copy takes is not. Each figure of such a run says that it
# is emulated.

# %% [markdown]
# ## Five exchanges
#
# Device 0 gets the batch, owns the model, and is the only one that remembers anything from step to step. All else is sent to
# the others, and sent back, in every single step:

# %%
pictures.data_parallel.dp_step(devices=2)

# %% [markdown]
# **Predict**, before you go on:
#
# 1. Which two of the five exchanges are the largest, and do they depend on the batch?
# 2. With four devices instead of two, what becomes of ②?
# 3. What do the other devices do while device 0 computes the loss, and while it updates the weights?
#
# <details class="answer"><summary>Answer</summary>
#
# ② and ⑤: all parameters go out, all gradients come back, whatever the batch. With four devices there are three copies to
# send, not one. Meanwhile the others do nothing.
#
# </details>

# %%
pictures.data_parallel.dp_step(devices=4)

# %% [markdown]
# ## The same in code
#
# This is the emulation, with the exchanges numbered. `nn.DataParallel` does the same between GPUs.

# %%
print(excerpt(Spec(strategy="dp", nproc=2, device="cpu"), "Replicas"))

# %% [markdown]
# Find the line where the replicas of the last step are lost. Why must ② be done again in every step?
#
# <details class="answer"><summary>Answer</summary>
#
# `copies` is made new in each forward. Only device 0's weights were updated, so every older copy is out of date.
#
# </details>
#
# ## Bytes: predict, then run
#
# The CNN has 405,898 parameters; an image has 28 × 28 pixels, and there are 10 outputs; each number has four bytes. Two
# devices take 128 samples each. How many bytes does each exchange move?

# %%
inputs, model, outputs = 4 * 128 * 28 * 28, 4 * 405_898, 4 * 128 * 10
predicted = {"scatter": inputs, "broadcast": model, "gather": outputs, "reduce": model}
print(predicted)

# %%
dp = run("dp", **HERE, steps=20)
show(dp)

# %%
dp.wait().ledger()

# %% [markdown]
# The ledger has your four numbers in its column *expected*. What comes **in** to device 0, outputs and gradients, can be
# measured. What it hands out is moved inside the process, where nobody counts: the ledger says so, and shows 0. ④, the
# gradients of the outputs, has as many bytes as ③.

# %% [markdown]
# ## The load on device 0
#
# **Predict:** the memory and the wire of which device are full first? How does that grow with the number of devices?

# %%
replicas = dp.summary()["replicas"]
for each in replicas:
    print(f"replica {each['replica']}: {each['samples']:.0f} samples, memory {each['memory'] / 2**20:.2f} MiB")
print("on top of that, replica 0 has, in bytes:", replicas[0]["extra"])

# %% [markdown]
# `memory` is what each replica takes for its own part. On CPU it counts parameters, inputs and outputs alone; on a GPU all
# that is allocated. What replica 0 has *on top* are the gathered outputs and the gradients of the others, and the optimizer's
# state, which no other device has. That is why under DP the first GPU runs out of memory while the rest have room.
#
# Now the wire, for more devices than you may have:

# %%
pictures.data_parallel.wires(8)

# %% [markdown]
# Device 0 carries the sum of all the others, so its wire is the limit: n devices take n − 1 times as long to feed as two. In
# DDP each rank sends and receives at most twice its gradients in each direction, however many there are (the ring of lab 01).

# %% [markdown]
# ## What do the threads wait for?
#
# All devices of DP are driven by one Python interpreter. It has one lock, the **GIL**: only the thread that holds it runs
# Python.
#
# **Predict:** a loop in pure Python takes some time in one thread. How long do two threads take for two such loops?


# %%
def seconds(work, threads):
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return time.perf_counter() - began


# %%
def loop(_):
    return sum(number * number for number in range(3_000_000))


one, two = seconds(loop, 1), seconds(loop, 2)
print(f"one thread {one:.2f} s, two threads {two:.2f} s: {two / one:.1f} times as long")

# %% [markdown]
# About twice as long, on however many cores: two threads take turns. (A Python that was built without a GIL would show 1.)
# What torch computes *inside* an operation gives the lock away; what is between two operations, and launching each of them on
# a GPU, needs it. In the run:

# %%
for each in replicas:
    forward, busy = 1e3 * each["forward"], 1e3 * each["cpu"]
    print(f"replica {each['replica']}: forward {forward:.1f} ms, on a core {busy:.1f} ms, waiting {forward - busy:.1f} ms")
print(f"a thread that does nothing but ask for the lock waits {dp.state.gil_wait or 0:.0%} of the time")

# %% [markdown]
# `forward` is by the clock; *on a core* is the time in which the thread really ran. The rest it waited: for the lock, or for
# a core. The two cannot be told apart from outside, so where there are more busy threads than cores the share is larger. On a
# GPU the threads only *queue* kernels, and what holds them up is the lock. With eight GPUs, eight threads want it.

# %% [markdown]
# ## DP against DDP
#
# DDP has a process, an interpreter and a model for each device. **Predict**, for the same 256 samples at each step and the
# same first weights: how many processes has each? Whose loss is lower after 12 steps? Who trains on more samples in a second?
#
# `compare` runs both, and one device alone before them.

# %%
both = compare(["dp", "ddp"], **HERE, batch_size=256, steps=12)
show(both)

# %%
both.wait()
for row, each in zip(both.rows, both.runs):
    speed = f"{row.samples_per_second or 0:,.0f} samples/s"
    print(f"{row.title:7} processes: {each.state.world_size}   loss {row.loss:.3f}   {speed}")

# %% [markdown]
# The loss is the same but for rounding, which grows with every step: DP and DDP are two ways to do *one* computation. How
# fast they are depends on the machine. Emulated DP pays nothing for a wire, so on CPU ranks it may well come close to DDP, or
# be ahead; on GPUs every one of the five exchanges is waited for, while DDP hides its only one behind backward.
#
# Two columns of the table mislead on CPU: DP shows *0 B* sent, because its copies pass no process group (the ledger above has
# them), and too little memory, because what is held in its threads is not counted.
#
# Point by point:
#
# | | DP | DDP |
# | --- | --- | --- |
# | processes | one, with a thread for each device | one for each device |
# | interpreter | one for all, with one lock | one each |
# | the model | copied to all devices at every step | copied once, at the start |
# | in a step | five exchanges, all with device 0 | one all-reduce, among equals |
# | hidden behind computing | nothing | most of it (lab 03) |
# | optimizer | on device 0 | on every rank, with the same gradients |
# | several machines | no | yes |
# | to change in the script | one line | the start, the sampler, one line |

# %% [markdown]
# ## Exercises
#
# **1.** The MLP has 669,706 parameters. Four devices take 64 images of 28 × 28 each; there are 10 outputs, and every number
# has four bytes. How many bytes in all are moved by each exchange, ① to ⑤? Give a list of five.

# %% tags=["exercise"]
exchanges = ...
check("data_parallel.exchanges", exchanges)

# %% [markdown]
# **2.** Of which is it true: `"dp"`, `"ddp"`, or `"both"`? Answer as `{"a": …, "b": …, …}`.
#
# - **a** The model is copied to the other devices at every step.
# - **b** One Python interpreter starts the work of all devices.
# - **c** At the end of backward every device has the gradients of the whole batch.
# - **d** What the busiest device sends and receives grows in proportion to the number of other devices.
# - **e** The devices may be in several machines.
# - **f** In a step, different devices compute on different samples.
# - **g** Only one device updates its weights.

# %% tags=["exercise"]
sides = ...
check("data_parallel.sides", sides)

# %% [markdown]
# **3.** Let both do the same training: a run of `dp` and one of `ddp` on two devices, at least ten steps each, and **96
# samples in all** at every step. Wait for them, and give both in a list.

# %% tags=["exercise"]
same = ...
check("data_parallel.same", same)
