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
# # Pipeline parallelism: a batch goes from rank to rank
#
# Another way to share a model that is too large: every rank takes some of its *blocks*. Rank 0 computes the first ones, and hands
# what comes out to rank 1. What travels is small: one activation, and not a gradient for every parameter. **But what does rank 1 do
# while rank 0 computes, and what does rank 0 do afterwards?**

# %%
from labkit import Spec, check, excerpt, pictures, place, run, show

HERE = place(2)  # two GPUs where there are as many, else two CPU ranks
pipe = pictures.pipeline

# %% [markdown]
# ## One batch, four ranks
#
# The pictures of this lab have a lane for each rank, and time goes to the right. A backward takes twice as long as a forward, sending
# takes nothing, and all stages cost the same: what is *modelled* so is bound to be better than what is *measured*.

# %%
pipe.gantt(pipe.simulate("GPipe", ranks=4, micro_batches=1))

# %% [markdown]
# One rank works, three wait: four GPUs as fast as one. The empty part is the **bubble**.
#
# ## Micro-batches
#
# GPipe (Huang et al. 2018) cuts the batch into **micro-batches**, whose numbers stand on the bars. As soon as rank 0 is done with
# number 0 it begins number 1.
#
# **Predict:** with 4 ranks and 8 micro-batches, which share of the time are the ranks idle? Count on a piece of paper: how long is
# the whole step, and how long is one rank busy?

# %%
pipe.gantt(pipe.simulate("GPipe", ranks=4, micro_batches=8))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A rank is busy for *m* forwards and *m* backwards. Before and between it waits for *p* − 1 of each, so
#
# $$\text{bubble} = \frac{p-1}{m+p-1} = \frac{3}{8+3} = 27\,\%$$
#
# It does not matter how much longer a backward takes than a forward.
#
# </details>
#
# ## 1F1B
#
# GPipe keeps the activations of *all* micro-batches until their backwards come. 1F1B (PipeDream-flush, Narayanan et al. 2021) lets each
# rank do *one forward, one backward* as soon as it can.
#
# **Predict:** does the bubble become smaller?

# %%
pipe.gantt(pipe.simulate("1F1B", ranks=4, micro_batches=8))

# %% [markdown]
# The bubble is the same: it has only moved. Look at the numbers instead. When rank 0 begins its backward of number 0, how many
# micro-batches has it sent on, whose activations it must keep?

# %%
pipe.activations(4, 8, ["GPipe", "1F1B"])

# %% [markdown]
# GPipe keeps *m*, 1F1B *p* on the first rank and 1 on the last, however many micro-batches there are. So 1F1B can afford more of
# them, and *that* makes its bubble smaller.
#
# ## Does it come true?
#
# Now a real pipeline: the GPT in 2 stages. It has 7 blocks: an embedding, 5 layers and a head. `STAGES` says where each stage begins. A
# rank keeps its own blocks alone, and torch's schedule around them.

# %%
job = {"strategy": "pp", "workload": "gpt", **HERE, "steps": 12, "samples": 200, "sample_every": 4}


def spec(schedule, micro_batches):
    return Spec(**job, options={"schedule": schedule, "micro_batches": micro_batches})


print(excerpt(spec("GPipe", 4), "MICRO_BATCHES", "STAGES", "parallelize"))

# %% [markdown]
# Five layers cannot be shared evenly by two. `planned` knows that, and counts the floating-point operations of each stage.
# **Predict:** which rank will wait more than by the formula?

# %%
pipe.gantt(pipe.planned(spec("GPipe", 4)))

# %%
gpipe = run(spec("GPipe", 4))
show(gpipe)

# %% [markdown]
# One step in four of this run is looked at closely. This is the same picture, now of what the ranks really did:

# %%
gpipe.wait()
pipe.gantt(pipe.measured(gpipe))

# %% [markdown]
# And 1F1B. First what it should do, then what it did:

# %%
pipe.gantt(pipe.planned(spec("1F1B", 4)))

# %%
one_f_one_b = run(spec("1F1B", 4)).wait()
pipe.gantt(pipe.measured(one_f_one_b))

# %% [markdown]
# The timeline has also what was sent: small messages, and a long `recv` wherever a rank waits for the one before it.

# %%
one_f_one_b.figure("timeline")

# %% [markdown]
# ## Prediction and measurement
#
# Three figures for the idle time: by formula (equal stages), by simulation (the stages as they are), and as measured. Beside it the
# activations that each rank held at the peak of a step.

# %%
runs = {("GPipe", 4): gpipe, ("1F1B", 4): one_f_one_b}
print(f"{'schedule':8}   m   formula  simulated  measured   activations in MiB, rank by rank")
for (schedule, m), done in runs.items():
    simulated, measured = pipe.planned(spec(schedule, m)).bubble, pipe.measured(done).bubble
    held = [rank.memory_step["at_peak"]["activations"] / 2**20 for _, rank in sorted(done.state.ranks.items())]
    told = "  ".join(f"{each:6.1f}" for each in held)
    print(f"{schedule:8}  {m:2}  {1 / (m + 1):8.0%}  {simulated:9.0%}  {measured:8.0%}   {told}")

# %% [markdown]
# <details class="answer"><summary>Why they differ</summary>
#
# - **Simulated and formula**: the stages are not equal. The cheaper one waits in every round, on top of the bubble.
# - **Measured and simulated**: messages take time, the first passes of a step are slower, and small micro-batches use a device badly.
#   On CPU ranks the two also share one machine's memory, and whatever else runs on it shows.
# - **Activations**: of 4 micro-batches GPipe's ranks keep 4; 1F1B's rank 0 keeps 2, and rank 1 only one.
#
# </details>
#
# ## More stages, smaller bubbles
#
# **Interleaved 1F1B** gives each rank *two* stages, that do not lie side by side: a micro-batch comes by twice. Filling the pipe
# takes stages of half the size, so the bubble halves, and
# more than twice as much is sent. Hatched is a rank's second stage.

# %%
pipe.gantt(pipe.simulate("Interleaved1F1B", ranks=4, micro_batches=8))

# %% [markdown]
# **Zero bubble** (Qi et al. 2023) sees that a backward is two computations: the gradients of the *inputs*, for which the rank before
# waits, and those of the *weights*, for which nobody waits before the optimizer. The second half can be put off, and fills the holes.

# %%
pipe.gantt(pipe.simulate("ZB-H1", ranks=4, micro_batches=8))

# %% [markdown]
# **Predict:** you have 4 ranks and memory for 8 micro-batches. Which schedule would you take? And if you could have 32?

# %%
pipe.bubbles(4)

# %%
pipe.activations(4, 8)

# %% [markdown]
# <details class="answer"><summary>What there is to say</summary>
#
# With 32 micro-batches all have small bubbles, and the simplest will do. With few, zero bubble is best, and keeps activations longer,
# since the weights' half still needs them. `InterleavedZeroBubble` is what torch offers: both ideas at once. None of it is free: two
# stages for each rank send more than twice as much, and cutting blocks into *four* equal stages is harder than into two.
#
# </details>
#
# Both for real. Of a zero bubble the lab sees that a half of a backward is computed, and not
# which one: both have one colour here.

# %% tags=["long"]
interleaved = run(spec("Interleaved1F1B", 4)).wait()
pipe.gantt(pipe.measured(interleaved))

# %% tags=["long"]
zero_bubble = run(spec("InterleavedZeroBubble", 4)).wait()
pipe.gantt(pipe.measured(zero_bubble))

# %% [markdown]
# And what theory had expected of them, with this model's four unequal stages:

# %%
for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble"):
    equal, real = pipe.simulate(schedule, 2, 4).bubble, pipe.planned(spec(schedule, 4)).bubble
    print(f"{schedule:22} {equal:5.0%} with equal stages  {real:5.0%} with these")

# %% [markdown]
# ## Exercise: the order of a stage
#
# Write `order(stage, stages, micro_batches)`: what the rank with stage number `stage` (from 0) does under **1F1B**, as a list like
# `["F0", "F1", "B0", …]`. Every micro-batch goes forward before it goes backward, and as few as can be are kept. Look at the picture
# of 1F1B lane by lane: how many forwards come before the first backward?


# %% tags=["exercise"]
def order(stage, stages, micro_batches): ...


check("pipeline_parallel.order", order)

# %% [markdown]
# ## Exercise: a small bubble
#
# Train the GPT with `pp` on two ranks, for 5 steps or more, so that the bubble is **at most 12 %** by formula. There is more than one
# way. Keep micro-batches as large as you can: a batch has 16 samples.

# %% tags=["exercise"]
small_bubble = ...  # run("pp", workload="gpt", **HERE, steps=5, samples=200, options={…}).wait()
check("pipeline_parallel.bubble", small_bubble)
