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
# **If you train on two devices instead of one, is training twice as fast? And what has to change in the program?**
#
# You will train a small network on one device, then on two, read the script that did it, and find the lines that made
# the difference. Everything runs for real, in separate processes. If this machine has GPUs, the runs use them. If it
# has none, they use *CPU ranks*: processes that train on the CPU. The concepts are the same.
#
# Run a cell with **Shift + Enter**. The cells of this lab compute for about 1 minute on two cores.

# %%
from labkit import Lab, Spec, check, diff_scripts, excerpt, guess, my_progress, pictures, run, show, write_script

# %% [markdown]
# ## What torchrun does
#
# A program that trains on several devices is *one* script, started *several times*: one process per device.
# `torchrun` starts the processes and gives each one its numbers in environment variables.

# %%
pictures.launching.torchrun(ranks=2)

# %% [markdown]
# Every process runs all of `train.py`. The processes differ only in these numbers:
#
# - **rank**: the number of a process, counted across all machines.
# - **local rank**: the number of a process on its machine. It selects the device.
# - **world size**: the number of processes.
#
# Before training starts, the processes find each other: the **rendezvous**. On one machine, `--standalone` sets it up.

# %% [markdown]
# ## One device
#
# `run` writes a training script, starts it under `torchrun`, and returns at once. `show` draws the run while it trains.

# %%
one = run("single", steps=20)
show(one)

# %% [markdown]
# At the top is **the machine**: a card for the device, with the memory that it holds, coloured by what is in it, and
# what it does at the moment. It plays one step in slow motion, over and over; you can stop it and point at any moment.
# Look for three things:
#
# 1. The **state** changes from *starting ranks* to *training*. Importing torch takes longer than the first steps.
# 2. **Memory** grows during forward and shrinks during backward: forward keeps *activations*, which backward needs.
# 3. The **loss** starts near 2.3. What is the loss of a network that considers all ten digits equally likely?
#
# <details class="answer"><summary>Answer</summary>
# It assigns each digit the probability 1/10, and −ln(1/10) = 2.303.
# </details>

# %% [markdown]
# ## Two devices: predict first
#
# In *distributed data parallel* training (DDP), every rank holds the whole model and trains on its own shard of the
# data set. After each backward pass, all ranks average their gradients, so their models stay identical.
#
# There are 60,000 samples, and every rank takes 128 of them per step. Write down your answers before you run the next
# cell:
#
# 1. How many steps make an epoch with one rank? With two?
# 2. How many samples does one step of two ranks process?

# %%
print("one rank: ", Spec(strategy="ddp", nproc=1).batch_sentence)
print("two ranks:", Spec(strategy="ddp", nproc=2).batch_sentence)

# %% [markdown]
# Will two ranks also process twice as many samples per second? `guess` keeps your own number for the next run, which
# draws it into its charts and tells you afterwards how close it was. Replace the three dots with the speed that you
# expect:

# %%
one.wait()  # so that the two runs do not share the machine
speed = one.summary()["samples_per_second"] or 0
print(f"one rank: {speed:,.0f} samples/s")
my_guess = guess("samples_per_second", ...)
my_guess

# %% [markdown]
# Now run it. Without `nproc`, labkit uses every GPU of this machine, or two CPU ranks if there is no GPU.
# If you have a single GPU, write `run("ddp", steps=20, device="cpu", nproc=2)` to get two ranks.

# %%
two = run("ddp", steps=20)
show(two)

# %% [markdown]
# The machine has two cards now. Watch what flows between them: during backward, an **all-reduce** averages the
# gradients of both ranks. A rank that comes early *waits for others*.

# %%
two.wait()
my_guess

# %% [markdown]
# <details class="answer"><summary>Was it twice as fast?</summary>
# Rarely. The ranks must all-reduce their gradients in every step, and CPU ranks also share cores and memory. DDP
# overlaps part of this communication: it sends the gradients of the last layers while backward is still computing those
# of the first layers.
# </details>
#
# And memory? Two devices share the work. Does each of them hold half as much as the one device did?

# %%
for what, job in (("one device", one), ("two devices", two)):
    held = [f"{rank['peak_memory_bytes'] / 2**20:.1f} MiB" for rank in job.summary()["ranks"]]
    print(f"{what}, peak per rank: {', '.join(held)}")

# %% [markdown]
# <details class="answer"><summary>Why not?</summary>
# Every rank holds the <em>whole</em> model: parameters, gradients and optimizer state. DDP splits the batch, nothing
# else. Here each rank even takes as many samples as the one device did, and DDP keeps the gradients a second time, in
# the buckets that it sends. Strategies that split the model's memory come in labs 04 to 07.
# </details>

# %% [markdown]
# ## The lines that matter
#
# The script is an ordinary PyTorch program. These lines make it train on several devices: `main` creates the *process
# group*, in which the ranks find each other, and `parallelize` wraps the model, so that backward averages the
# gradients.

# %%
ddp = Spec(strategy="ddp", nproc=2)
excerpt(ddp, "parallelize", "main")

# %% [markdown]
# This is the complete script; click to unfold it. It needs PyTorch, and scikit-learn for the digits. The command in its
# first line runs it on any machine.

# %%
write_script(ddp)

# %% [markdown]
# And this is everything that changes from one device to two. A line with `-` is removed, a line with `+` is added. Find
# the line that gives each rank its shard of the data set.

# %%
diff_scripts(Spec(strategy="single"), ddp)

# %% [markdown]
# ## The panel
#
# The panel does the same with buttons. Choose a strategy, look at **Script & diff** before anything runs, then press
# **Run**. **Logs** shows what each rank prints. **Stop** terminates the run and all of its processes.

# %%
Lab(strategy="ddp", steps=20)

# %% [markdown]
# Try the following. Before each run, say what you expect; the fields *Your guess* take the peak memory and the step
# time.
#
# 1. Set *Batch size* to **in total**: the ranks now split one batch. What happens to the step time?
# 2. Use more CPU ranks than this machine has cores. Which phase of the step grows?
# 3. Choose **FSDP2**: every rank stores only a shard of the model. Which curve of the memory chart drops?
#
# The same from a terminal: `python3 -m labkit run ddp --nproc 2`. Every run is saved in its own folder under `runs/`,
# and `show("last")` opens the most recent one.

# %% [markdown]
# ## Exercises
#
# Every lab ends with exercises. `check` grades your answer and says what is wrong. Replace the three dots with your
# answer.
#
# **1.** 60,000 samples, three ranks, 128 samples per rank and step: how many steps make an epoch?

# %% tags=["exercise"]
steps = ...
check("start.steps", steps)

# %% [markdown]
# **2.** Two ranks with 128 samples each process 256 samples per step, so they do not train as one device with 128 does.
# Start a DDP run on two ranks with a global batch size of 128, and wait until it ends: `run(…).wait()`.

# %% tags=["exercise"]
same_batch = ...
check("start.two", same_batch)

# %% [markdown]
# Next: [lab 01](01_collectives.py), and before lab 02 [lab 18](18_one_device.py), about what a single device can do.
# Your progress in all labs:

# %%
my_progress()
