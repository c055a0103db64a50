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
# # Start here: from one device to two
#
# **With two devices instead of one: is training twice as fast, and what in the program has to change?**
#
# You will train a small network on one device, then on two at once, read the script that did it, and see exactly which lines made the
# difference. Everything runs for real, in processes of its own. With GPUs in this machine they are used; without one, "CPU ranks"
# stand in for them, and every idea is the same.
#
# Run a cell with **Shift + Enter**.

# %%
from labkit import Lab, Spec, check, diff_scripts, my_progress, run, show, write_script

# %% [markdown]
# ## What torchrun does
#
# A program that trains on several devices is *one* script, started *several times*: one process for each device.
# `torchrun` starts them and tells each one who it is.
#
# ```text
#                            ┌─ process: RANK=0 LOCAL_RANK=0 ── device 0
#                            │                   ▲
# torchrun                  ─┤                   │ gradients
#   --nproc-per-node=2       │                   ▼
#   train.py                 └─ process: RANK=1 LOCAL_RANK=1 ── device 1
# ```
#
# - **rank**: the number of a process, counted over all machines.
# - **local rank**: its number on its own machine, and so the device that it takes.
# - **world size**: how many processes there are.
# - **rendezvous**: the meeting point where they find each other before the first step. On one machine `--standalone` arranges it.
#
# Every process runs all of `train.py`. They differ in nothing but these numbers.

# %% [markdown]
# ## One device
#
# `run` writes out a training script, starts it under `torchrun`, and returns at once. `show` draws it while it trains.

# %%
one = run("single", steps=30)
show(one)

# %% [markdown]
# While it trains, look for three things:
#
# 1. The **state** goes from *starting ranks* to *training*: importing torch takes longer than the first steps.
# 2. The **loss** begins near 2.3. Guess why before you read on: what is the loss of a network that finds all ten digits equally likely?
#
# <details class="answer"><summary>Answer</summary>
# It gives each digit the probability 1/10, and −ln(1/10) = 2.303.
# </details>
#
# 3. **Where a step's time goes**: backward takes about twice as long as forward.

# %% [markdown]
# ## Two devices: predict first
#
# In *distributed data parallel* training (DDP) every rank holds the whole model and trains on its own share of the samples. After
# each backward pass all ranks average their gradients, so that their models stay equal.
#
# There are 60,000 samples, and every rank takes 128 of them at a step. Write down your answers before you run the next cell:
#
# 1. With one rank, how many steps make an epoch? With two?
# 2. How many samples does one step of two ranks learn from?
# 3. Will two ranks show twice as many samples in a second?

# %%
print("one rank: ", Spec(strategy="ddp", nproc=1).batch_sentence)
print("two ranks:", Spec(strategy="ddp", nproc=2).batch_sentence)

# %% [markdown]
# Now run it. How many ranks is left open here: it will be every GPU of this machine, or two CPU ranks where there is none.
# With a single GPU, write `run("ddp", steps=30, device="cpu", nproc=2)` to see two ranks all the same.

# %%
one.wait()  # so that the two do not share the machine
two = run("ddp", steps=30)
show(two)

# %%
two.wait()
for each in (one, two):
    figures = each.summary()
    speed = figures["samples_per_second"] or 0
    print(f"{figures['strategy']:6}  {figures['world_size']} rank(s)  {speed:6,.0f} samples/s  {figures['state']}")

# %% [markdown]
# <details class="answer"><summary>Was it twice as many?</summary>
# Seldom quite. The gradients have to travel at every step, and on CPU the ranks also share cores and memory. DDP hides part of the
# journey by sending the gradients of the last layers while backward still works on the first.
# </details>

# %% [markdown]
# ## The script
#
# Nothing was hidden: this is all that ran. It needs PyTorch, and scikit-learn for the digits. The command in its first line
# runs it anywhere.

# %%
print(write_script(Spec(strategy="ddp", nproc=2)))

# %% [markdown]
# ## The difference
#
# And this is all that changes from one device to two. A line with `-` goes, a line with `+` comes. Find the lines that
#
# 1. let the ranks meet,
# 2. give each rank its own share of the samples,
# 3. make the gradients travel.

# %%
print(diff_scripts(Spec(strategy="single"), Spec(strategy="ddp", nproc=2)))

# %% [markdown]
# ## The panel
#
# The same with buttons. Choose a strategy, look at **Script & diff** before anything runs, then press **Run**.
# **Logs** has what each rank prints; **Stop** ends the run, and no process of it is left.

# %%
Lab(strategy="ddp", steps=60)

# %% [markdown]
# Try this, and say before each run what you expect:
#
# 1. Set *Batch is* to **in all**: the batch is now shared by the ranks. What happens to the time of a step?
# 2. Take more CPU ranks than this machine has cores. Which phase grows?
# 3. Choose **FSDP2**: every rank keeps only a part of the model. Which line of the memory chart falls?
#
# The same from a terminal: `python3 -m labkit run ddp --nproc 2`. Every run stays in its own folder under `runs/`, and
# `show("last")` brings the newest one back.

# %% [markdown]
# ## Exercises
#
# Every lab ends with some. They check themselves, and say what is wrong; put your answer in the place of the three dots.
#
# **1.** 60,000 samples, three ranks, 128 samples a rank at a step: how many steps make an epoch?

# %% tags=["exercise"]
steps = ...
check("start.steps", steps)

# %% [markdown]
# **2.** Two ranks of 128 samples learn from 256 at a step: that is another training than on one device. Start a run of DDP on two
# ranks whose steps learn from 128 samples in all, and wait for its end: `run(…).wait()`.

# %% tags=["exercise"]
same_batch = ...
check("start.two", same_batch)

# %% [markdown]
# What you have done so far, over all labs:

# %%
my_progress()
