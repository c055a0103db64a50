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
# # Reading a profile: five faults
#
# A script trains the right thing, and takes more than twice as long as it has to. Nothing in its output says so.
# **Which lines cost the time, and how do you know before you change any of them?**
#
# In this lab you get such a script. You predict, look at four kinds of evidence (phases, traffic, operators, the
# timeline), and name five faults. Then you fix them, and a judge measures on two ranks which of them are left. The
# cells of this lab compute for about 1 minute on two cores, and a check for 10 to 20 seconds.

# %%
import inspect
import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from labkit import check, explain, guess, run, starter

HERE = {"nproc": 2, "device": "cpu"}
slow = starter("profiles.faults")
print(slow, "is next to this notebook:", len(slow.read_text().splitlines()), "lines")

# %% [markdown]
# Open `slow_training.py` and read it once. It is a small language model on two CPU ranks. Each step has four
# micro-batches per rank, whose gradients add up to one update.
#
# **Predict**, before you run it: which part of a step takes longest? Loading, forward, backward, communication, or the
# optimizer? Write down an order, and compare it with the run: the first rule of performance work is *measure,
# then change*.
#
# ## 1. Phases: where to look

# %%
my_guess = guess("sent_mb", ...)  # MiB that a rank sends per step
job = run(slow, **HERE).wait()
my_guess

# %%
job.figure("phases")

# %% [markdown]
# <details class="answer"><summary>What the phases say, and what they do not</summary>
#
# Two parts should be small and are not: *communication*, during which nothing computes, and *other*, which is none of
# the named phases. A `DataLoader` would show up as *data*, but this script loads by itself.
# Forward and backward are the largest part, and look innocent: a phase says how long, not how long it should take.
#
# </details>
#
# ## 2. Traffic: how much, how often
#
# The gradients have 4 bytes per parameter. With *n* ranks, an all-reduce sends 2 (n − 1) / n of them
# ([lab 01](01_collectives.py)). **Predict** the number of calls per step that a good script needs.

# %%
import slow_training as script

gradients = sum(parameter.nbytes for parameter in script.Model().parameters())
print(f"gradients: {gradients / 2**20:.2f} MiB; one all-reduce between two ranks sends as much per rank")
job.ledger()

# %% [markdown]
# <details class="answer"><summary>Two different faults</summary>
#
# Divide the traffic by the size of the gradients, then the calls by that number. Too many bytes and too many calls have
# different causes and cost different things: bytes cost bandwidth, calls cost latency. With *gradient accumulation*,
# only the last micro-batch needs communication; DDP has `no_sync()` for that. And 30 small tensors can be one large
# one, which is what DDP's buckets are for ([lab 03](03_ddp.py), [lab 13](13_build_ddp_and_zero.py)).
#
# </details>
#
# ## 3. Operators: who calls what
#
# torch's own profiler records each operator that the CPU runs. Loading and the model need no second rank, so profile
# them here, without torchrun. **Predict** how many operators it takes to load one micro-batch: 4 samples of 257 bytes.

# %%
training = script.Training(inspect.getsource(inspect).encode(), script.Model().state_dict())
os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler, when it is first used, shall not report that it starts
with profile(activities=[ProfilerActivity.CPU]) as loading:
    inputs, targets = training.load([0, 300, 600, 900])
del os.environ["KINETO_LOG_LEVEL"]  # or later runs would start in another environment
print(loading.key_averages().table(sort_by="self_cpu_time_total", row_limit=6, max_name_column_width=30))

# %% [markdown]
# *Self* is the time in an operator without those that it calls; *# of Calls* is the column to read first. Now the
# model: forward and backward of one micro-batch, with the shapes of its tensors. It runs once before it is profiled,
# because the first call of an operator also loads and allocates.


# %%
def train():
    logits = training.model(inputs)
    script.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


train()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as computing:
    train()
by_shape = computing.key_averages(group_by_input_shape=True)
for row in sorted(by_shape, key=lambda row: -row.self_cpu_time_total)[:12]:
    print(f"{row.self_cpu_time_total / 1e3:7.1f} ms {row.count:4} × {row.key:28}{row.input_shapes[:2]}")

# %% [markdown]
# <details class="answer"><summary>What the shapes say</summary>
#
# Look for `[4, 4, 256, 256]`: the scores of attention, a number for each pair of positions and each head. Each operator
# on them reads and writes a million numbers and computes almost nothing with them, so memory limits it
# ([lab 18](18_one_device.py)). A fused kernel computes attention in blocks and never stores the scores (FlashAttention:
# Dao et al. 2022); torch has it as `scaled_dot_product_attention`, on the CPU too.
#
# </details>
#
# **What a CPU does not show.** `.item()` hands a number to Python. On a CPU it is there already. A GPU works
# asynchronously: the CPU launches kernels ahead, and `.item()` makes it wait until all of them are done. Then the queue
# is empty, and the GPU idles until the next kernels arrive. PyTorch's *Performance Tuning Guide* therefore says: avoid
# unnecessary CPU–GPU synchronization. Other operators do the same: `print(tensor)`, `.nonzero()`, `if tensor > 0`.
# Count them before you move to GPUs:

# %%
with profile(activities=[ProfilerActivity.CPU]) as clipping:
    training.clip_gradients()
counted = {row.key: row.count for row in clipping.key_averages()}
print("synchronizations to clip the gradients once:", counted.get("aten::_local_scalar_dense", 0))

# %% [markdown]
# ## 4. The timeline: what waits for what
#
# Tables add up; a timeline shows the order. A profiled step of both ranks is in the run. Where do the ranks
# communicate, and what does the other row of the same rank do in the meantime?

# %%
job.figure("timeline")

# %% [markdown]
# To zoom into single operators, write the profile as a file and open it in [Perfetto](https://ui.perfetto.dev), which
# runs in the browser and uploads nothing: `W` and `S` zoom, `A` and `D` move, a click names an operator. Read it from
# top to bottom: a row is a thread or a stream, and what lies below a bar was called by it. `job.export("perfetto")`
# writes the steps of all ranks in the same format. `explain` reads what torch's profiler wrote, from any job on any
# machine:

# %%
computing.export_chrome_trace("computing.json")
explain("computing.json")

# %% [markdown]
# ## The profile of a GPU
#
# This is what `explain` says about a trace that was recorded on A100s. It is **recorded, not from this machine**: rank
# 0 of a convolutional network, from the test data of Holistic Trace Analysis (facebookresearch/HolisticTraceAnalysis,
# MIT licence).
#
# | per step | compute | communication | exposed | copies | idle | launch-bound |
# | --- | --- | --- | --- | --- | --- | --- |
# | 218 ms | 18 % | 6 % | 5 % | 0 % | 77 % | 66 % |
#
# - *exposed*: communication during which nothing computes
# - *idle*: no kernel runs at all
# - *launch-bound*: idle, because the CPU had not launched the next kernel yet
#
# A step has 1,258 kernels of 0.006 ms in the median, and launching one takes Python and torch longer than that.
# **Predict**: what would faster links gain here? What would a GPU gain that computes twice as fast?
#
# <details class="answer"><summary>What to fix here</summary>
#
# Links: at most 5 %. A faster GPU: less than 10 %, because compute is 18 %. This job needs fewer or larger kernels: a
# larger batch, `torch.compile(mode="reduce-overhead")` (CUDA graphs), a fused optimizer. Without a profile, people buy
# the network first.
#
# </details>
#
# The order of questions for any profile, from the coarse to the fine (the *Ultra-Scale Playbook*, appendix on
# profiling, and the documentation of Holistic Trace Analysis have more examples):
#
# 1. Is the device idle? If so, does it wait for data, for launches, for another rank, or at a synchronization?
# 2. Is communication exposed? Then how many bytes, how many calls, and could they start earlier?
# 3. If the device computes: which operators, on which shapes, and is that limited by memory or by computing?
#
# If a job hangs instead, there is no profile: read what the *flight recorder* wrote
# ([lab 12](12_troubleshooting.py); `explain` reads its dumps).
#
# ## Exercises
#
# **1. What can a fix gain?** A step takes `step` ms, of which `part` ms go to one thing. A fix reduces that to `left`
# ms. Return the factor by which training becomes faster.


# %% tags=["exercise"]
def gain(step, part, left): ...


check("profiles.gain", gain)

# %% [markdown]
# **2. The profile above.** By which factor would a step become faster at most, if the GPU never waited for a launch?

# %% tags=["exercise"]
factor = ...
check("profiles.launches", factor)

# %% [markdown]
# **3. Five faults.** This cell copies the script to `fast_training.py`, unless you have one already. Make it fast.
# `check` takes its path and runs your class `Training` on two ranks, with a text, micro-batches and parameters that it
# draws anew each time. It requires:
#
# - **the same training**: the losses and the final parameters of a single device, from the same number of samples and
#   steps, with the same model. `load`, `step` and `parameters` return what their docstrings say
# - **no fault**, by what it counts per step: operators that load a micro-batch, elements that are computed outside of
#   matrix products, bytes sent, calls to send them, and values that `step` hands to Python
#
# It never reads how you did it. `DistributedDataParallel` is allowed, and so is anything else in torch that needs no
# files, threads or processes. The verdict names each fault that is left, with its figure, so fix one at a time.

# %%
mine = Path("fast_training.py")
if not mine.exists():
    mine.write_text(slow.read_text())
print(mine, "is ready to be edited")

# %% tags=["exercise"]
answer = ...  # "fast_training.py", when you have changed it
check("profiles.faults", answer)

# %% [markdown]
# Counts do not depend on how busy the machine is; seconds do. So the judge grades counts, and this cell shows seconds:
# both scripts in alternation, so that a slow minute hits both alike. **Predict** the factor first.

# %% tags=["long"]
times = {path.stem: [] for path in (slow, mine)}
for _ in range(3):
    for path in (slow, mine):
        ranks = run(path, **HERE).wait().summary()["ranks"]
        times[path.stem].append(ranks[0]["step_seconds_median"])
for before, after in zip(*times.values()):
    print(f"{1e3 * before:6.0f} ms → {1e3 * after:4.0f} ms per step: {before / after:.1f} times as fast")

# %% [markdown]
# ## Summary
#
# | symptom in a profile | likely cause | fix |
# | --- | --- | --- |
# | thousands of tiny operators before forward | one value at a time | whole tensors, workers (lab 09) |
# | operators on positions × positions | attention stores its scores | `scaled_dot_product_attention` |
# | traffic is a multiple of the gradients | every micro-batch communicates | `no_sync()`, or communicate once |
# | many small collectives | one call per parameter | buckets |
# | the CPU waits, then the GPU | a value of a tensor is read in each step | keep it a tensor; read it when you print |
#
# A fix without a profile before and after it is a guess.
