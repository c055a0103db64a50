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
# **One line, `nn.DataParallel(model)`, and all GPUs are used. Why does its own documentation advise against it?**
#
# This lab takes half an hour. You find out what DP sends in every step, what device 0 has to do, what the threads wait
# for, and how DDP avoids all of this. The cells of this lab compute for about 1 minute on two cores.

# %%
import time
from concurrent.futures import ThreadPoolExecutor

from labkit import Spec, check, compare, excerpt, guess, pictures, place, run, show

HERE = place(2)
print(HERE)

# %% [markdown]
# With two or more GPUs, this lab runs `nn.DataParallel` itself. Without them, DP is **emulated**: each device is a
# thread of one CPU process, and transfers between devices are copies within memory. The order of operations, the work
# of device 0 and the single Python interpreter are as in real DP. The time of a transfer is not. Every figure of an
# emulated run is labelled as emulated.

# %% [markdown]
# ## Five transfers
#
# Device 0 receives the batch and owns the model. It is the only device that keeps state from step to step. Everything
# else is sent to the other devices and back in every step:

# %%
pictures.data_parallel.dp_step(devices=2)

# %% [markdown]
# **Predict** before you go on:
#
# 1. Which two of the five transfers are the largest, and do they depend on the batch size?
# 2. With four devices instead of two, how does ② change?
# 3. What do the other devices do while device 0 computes the loss and updates the weights?
#
# <details class="answer"><summary>Answer</summary>
#
# ② and ⑤: all parameters go out and all gradients come back, whatever the batch size. With four devices the parameters
# are broadcast to three replicas instead of one. While device 0 computes the loss and the update, the others idle.
#
# </details>

# %%
pictures.data_parallel.dp_step(devices=4)

# %% [markdown]
# ## The same in code
#
# This is the emulation, with numbered transfers. `nn.DataParallel` does the same between GPUs.

# %%
excerpt(Spec(strategy="dp", nproc=2, device="cpu"), "Replicas")

# %% [markdown]
# Find the line that discards the replicas of the last step. Why must ② be repeated in every step?
#
# <details class="answer"><summary>Answer</summary>
#
# Each forward pass creates `copies` again. Only device 0's weights are updated, so the copies of the previous step are
# outdated.
#
# </details>
#
# ## Bytes: predict, then run
#
# The CNN has 405,898 parameters, an image has 28 × 28 pixels, there are 10 outputs, and each number has four bytes. Two
# devices process 128 samples each. How many bytes does each transfer move?

# %%
mine = {"scatter": 1.0, "broadcast": 1.0, "gather": 1.0, "reduce": 1.0}  # MB: replace them by your predictions

# %%
dp = run("dp", **HERE, steps=10)
show(dp)

# %%
for entry in dp.wait().ledger():
    print(f"{entry.op:10} you predicted {mine[entry.op]:.3g} MB, expected {entry.theory / 1e6:.3g} MB")
dp.ledger()

# %% [markdown]
# <details class="answer"><summary>The four numbers</summary>
#
# scatter: 4 · 128 · 28 · 28 bytes = 0.401 MB, the images of the second device. broadcast and reduce: 4 · 405,898 bytes
# = 1.62 MB, its copy of the model and its gradients. gather: 4 · 128 · 10 bytes = 0.00512 MB, its outputs.
#
# </details>
#
# The transfers **to** device 0, outputs and gradients, can
# be measured. The transfers from device 0 happen inside the process and cannot be counted there; the ledger says so and
# shows 0. ④, the gradients of the outputs, has as many bytes as ③.

# %% [markdown]
# ## The load on device 0
#
# **Predict:** which device runs out of memory first, and which link saturates first? How does that grow with the number
# of devices?

# %%
replicas = dp.summary()["replicas"]
for each in replicas:
    print(f"replica {each['replica']}: {each['samples']:.0f} samples, memory {each['memory'] / 2**20:.2f} MiB")
print("in addition, replica 0 has, in bytes:", replicas[0]["extra"])

# %% [markdown]
# `memory` is the memory of each replica. On CPU it counts only parameters, inputs and outputs; on a GPU it counts
# everything that is allocated. *In addition*, replica 0 holds the gathered outputs, the gradients of the other
# replicas, and the optimizer state, which exists on no other device. That is why the first GPU runs out of memory under
# DP while the others have memory to spare.
#
# Now the traffic per link, for more devices than you may have:

# %%
pictures.data_parallel.wires(8)

# %% [markdown]
# If device 0 serves the other devices one after another, as in the emulation, its traffic with n devices is n − 1 times
# that of two devices. Between GPUs with NCCL, `nn.DataParallel` broadcasts the parameters and reduces the gradients
# with NCCL (`torch/csrc/cuda/comm.cpp`, `nccl.reduce`), which pass them from device to device. Then parameters leave
# device 0 about once and gradients arrive about once, and only inputs and outputs grow with n. This follows from
# PyTorch's source; it was not measured here. Under DDP each rank sends at most twice the size of its gradients and
# receives as much, however many ranks there are (the ring of lab 01), and no rank has the batch of the others.

# %% [markdown]
# ## What do the threads wait for?
#
# A single Python interpreter drives all devices of DP. It has one global lock, the **GIL**: only the thread that holds
# it runs Python code.
#
# **Predict:** a loop in pure Python takes some time in one thread. How long do two such loops take in two threads?


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
# They take about twice as long, on any number of cores, because the two threads take turns: Python code runs only in
# the thread that holds the interpreter's lock (the GIL). A free-threaded build of Python has no such lock, and on two
# cores would show 1. torch releases it while an operation computes; the Python code between two operations needs it,
# and so does the code that launches each operation on a GPU. In the run:

# %%
for each in replicas:
    forward, busy = 1e3 * each["forward"], 1e3 * each["cpu"]
    print(
        f"replica {each['replica']}: forward {forward:.1f} ms, CPU time {busy:.1f} ms, waiting {forward - busy:.1f} ms"
    )
print(f"a thread that only requests the lock waits {dp.summary()['gil_wait'] or 0:.0%} of the time")

# %% [markdown]
# *forward* is wall-clock time. *CPU time* is the time in which the thread actually ran. In the remaining time it waited
# for the lock or for a core. The measurement cannot distinguish the two, so the wait is longer if there are more busy
# threads than cores. On a GPU the threads only *queue* kernels, and they wait for the lock. With eight GPUs, eight
# threads compete for it.

# %% [markdown]
# ## DP versus DDP
#
# DDP has one process, one interpreter and one model per device. **Predict**, for the same 128 samples per step and the
# same initial weights: how many processes does each one have? Whose loss is lower after 10 steps? Which one processes
# more samples per second? `compare` runs both, after a run on a single device. Replace the three dots with the
# speed-ups over it that you expect, such as `{"dp": 1.1, "ddp": 1.2}`.

# %%
my_guess = guess("speedup", ...)
both = compare(["dp", "ddp"], **HERE, batch_size=128, steps=10)
show(both)

# %%
both.wait()
for row, each in zip(both.rows, both.runs):
    speed = f"{row.samples_per_second or 0:,.0f} samples/s"
    print(f"{row.title:7} processes: {each.state.world_size}   loss {row.loss:.3f}   {speed}")
my_guess

# %% [markdown]
# The loss is the same up to rounding, and the rounding differences grow with every step: DP and DDP are two
# implementations of the *same* computation. Their speed depends on the machine. Emulated DP pays nothing for transfers,
# so on CPU ranks it may be close to DDP or even faster. On GPUs, all five transfers of DP are exposed, while DDP
# overlaps its only collective with backward.
#
# On CPU, two columns of the table are misleading for DP. It shows *0 B* sent, because its copies use no process group
# (the ledger above shows them). It also shows too little memory, because memory that the threads allocate is not
# counted.
#
# Point by point:
#
# | | DP | DDP |
# | --- | --- | --- |
# | processes | one, with a thread per device | one per device |
# | interpreter | one for all devices, with one lock | one per device |
# | the model | copied to all devices in every step | copied once, at the start |
# | communication per step | five transfers, all to or from device 0 | one all-reduce among equal ranks |
# | overlapped with computation | nothing | most of it (lab 03) |
# | optimizer | on device 0 | on every rank, with the same gradients |
# | several machines | no | yes |
# | changes to the script | one line | the launch, the sampler, one line |

# %% [markdown]
# ## Exercises
#
# **1.** The MLP has 669,706 parameters. Four devices process 64 images of 28 × 28 each, there are 10 outputs, and every
# number has four bytes. How many bytes does each transfer, ① to ⑤, move in total? Answer with a list of five numbers.

# %% tags=["exercise"]
exchanges = ...
check("data_parallel.exchanges", exchanges)

# %% [markdown]
# **2.** For which is each statement true: `"dp"`, `"ddp"`, or `"both"`? Answer as `{"a": …, "b": …, …}`.
#
# - **a** The model is copied to the other devices in every step.
# - **b** A single Python interpreter drives all devices.
# - **c** At the end of backward, every device has the gradients of the whole batch.
# - **d** One device receives the outputs of all others, so some of its traffic grows with the number of devices.
# - **e** The devices may be in several machines.
# - **f** Within a step, different devices compute on different samples.
# - **g** Only one device updates its weights.

# %% tags=["exercise"]
sides = ...
check("data_parallel.sides", sides)

# %% [markdown]
# **3.** Run the same training with both: one run of `dp` and one of `ddp`, on two devices, for at least ten steps each,
# with a **global batch size of 96**. Wait for both runs, and answer with a list of the two.

# %% tags=["exercise"]
same = ...
check("data_parallel.same", same)
