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
# # Pipeline parallelism: a batch passes from rank to rank
#
# There is another way to split a model that is too large: every rank takes some of its *blocks*. Rank 0 computes the
# first blocks and sends the result to rank 1. The messages are small: one activation instead of a gradient for every
# parameter. **But what does rank 1 do while rank 0 computes, and what does rank 0 do afterwards?** The cells of this
# lab compute for about 1 minute on two cores.

# %%
from labkit import Spec, check, excerpt, guess, pictures, place, run, show

HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks
pipe = pictures.pipeline

# %% [markdown]
# ## One batch, four ranks
#
# The pictures in this lab have one lane per rank, and time runs to the right. The simulation assumes that a backward
# takes twice as long as a forward, that communication takes no time, and that all stages cost the same. So the
# *simulated* schedules are always better than the *measured* ones.

# %%
pipe.gantt(pipe.simulate("GPipe", ranks=4, micro_batches=1))

# %% [markdown]
# One rank computes and three wait: four GPUs are as fast as one. The idle time is called the **bubble**.
#
# ## Micro-batches
#
# GPipe (Huang et al. 2018) splits the batch into **micro-batches**, whose numbers are on the bars. As soon as rank 0 is
# done with micro-batch 0, it starts micro-batch 1.
#
# **Predict:** with 4 ranks and 8 micro-batches, for what fraction of the time are the ranks idle? Work it out on paper:
# how long is the whole step, and how long is one rank busy?

# %%
pipe.gantt(pipe.simulate("GPipe", ranks=4, micro_batches=8))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A rank is busy for *m* forwards and *m* backwards. In addition, it waits for *p* − 1 of each, so
#
# $$\text{bubble} = \frac{p-1}{m+p-1} = \frac{3}{8+3} = 27\,\%$$
#
# The ratio of backward time to forward time does not matter.
#
# </details>
#
# ## 1F1B
#
# GPipe stores the activations of *all* micro-batches until their backwards. With 1F1B (PipeDream-flush, Narayanan et
# al. 2021), each rank alternates *one forward, one backward* as soon as it can.
#
# **Predict:** does the bubble become smaller?

# %%
pipe.gantt(pipe.simulate("1F1B", ranks=4, micro_batches=8))

# %% [markdown]
# The bubble is the same size, in a different position. Look at the numbers instead: when rank 0 starts the backward of
# micro-batch 0, of how many micro-batches does it store the activations?

# %%
pipe.activations(4, 8, ["GPipe", "1F1B"])

# %% [markdown]
# GPipe stores *m*. 1F1B stores *p* on the first rank and 1 on the last, however many micro-batches there are. So with
# 1F1B you can use more micro-batches, and *that* makes the bubble smaller.
#
# ## Simulation and reality
#
# Now run a real pipeline: the GPT in 2 stages. It has 7 blocks: an embedding, 5 layers and a head. `STAGES` says where
# each stage begins. Each rank keeps only its own blocks and runs torch's schedule on them.

# %%
job = {"strategy": "pp", "workload": "gpt", **HERE, "steps": 8, "samples": 200, "sample_every": 4}


def spec(schedule, micro_batches):
    return Spec(**job, options={"schedule": schedule, "micro_batches": micro_batches})


excerpt(spec("GPipe", 4), "MICRO_BATCHES", "STAGES", "parallelize")

# %% [markdown]
# Five layers cannot be split evenly between two stages. `planned` accounts for that by counting the floating-point
# operations of each stage. **Predict:** which rank waits longer than the formula says?

# %%
pipe.gantt(pipe.planned(spec("GPipe", 4)))

# %%
gpipe = run(spec("GPipe", 4))
show(gpipe)

# %% [markdown]
# This run profiles every fourth step. Here is the same picture, now of what the ranks really did:

# %%
gpipe.wait()
pipe.gantt(pipe.measured(gpipe))

# %% [markdown]
# Now 1F1B: first the simulation, then the measurement.

# %%
pipe.gantt(pipe.planned(spec("1F1B", 4)))

# %% [markdown]
# **Predict** the activations that each of the two ranks stores at most, as a list of two values in MiB: count
# micro-batches in the picture. With GPipe they were:

# %%
print([round(rank["memory_bytes"]["activations"] / 2**20, 1) for rank in gpipe.summary()["ranks"]])

# %%
my_guess = guess("activations_mb", ...)
one_f_one_b = run(spec("1F1B", 4)).wait()
pipe.gantt(pipe.measured(one_f_one_b))

# %%
my_guess

# %% [markdown]
# The timeline also shows the communication: small messages, and a long `recv` whenever a rank waits for the previous
# stage.

# %%
one_f_one_b.figure("timeline")

# %% [markdown]
# ## Prediction and measurement
#
# The table compares three values of the idle time: by formula (equal stages), simulated (the actual stages), and
# measured. The last columns are the activations of each rank at the peak of a step.

# %%
runs = {("GPipe", 4): gpipe, ("1F1B", 4): one_f_one_b}
print(f"{'schedule':8}   m   formula  simulated  measured   activations in MiB, by rank")
for (schedule, m), done in runs.items():
    simulated, measured = pipe.planned(spec(schedule, m)).bubble, pipe.measured(done).bubble
    stored = [rank.memory_step.at_peak["activations"] / 2**20 for _, rank in sorted(done.state.ranks.items())]
    cells = "  ".join(f"{each:6.1f}" for each in stored)
    print(f"{schedule:8}  {m:2}  {1 / (m + 1):8.0%}  {simulated:9.0%}  {measured:8.0%}   {cells}")

# %% [markdown]
# <details class="answer"><summary>Why they differ</summary>
#
# - **Simulation versus formula**: the stages are not equal. The faster stage waits in every round, in addition to the
#   bubble.
# - **Measurement versus simulation**: messages take time, the first passes of a step are slower, and small
#   micro-batches use a device inefficiently. CPU ranks also share the memory bandwidth of one machine with each other
#   and with all other processes.
# - **Activations**: with 4 micro-batches, GPipe stores those of 4 on each rank; 1F1B stores those of 2 on rank 0 and of
#   1 on rank 1.
#
# </details>
#
# ## More stages, smaller bubbles
#
# **Interleaved 1F1B** gives each rank *two* stages that are not adjacent, so each micro-batch passes each rank twice.
# Filling the pipeline takes stages of half the size, so the bubble halves, but the ranks send more than twice as much.
# The second stage of a rank is hatched.

# %%
pipe.gantt(pipe.simulate("Interleaved1F1B", ranks=4, micro_batches=8))

# %% [markdown]
# **Zero bubble** schedules (Qi et al. 2023) split a backward into two computations: the gradients of the *inputs*,
# which the previous stage waits for, and those of the *weights*, which are not needed before the optimizer step. The
# second computation can be delayed to fill the bubble.

# %%
pipe.gantt(pipe.simulate("ZB-H1", ranks=4, micro_batches=8))

# %% [markdown]
# ## Stages in a V
#
# Interleaved stages go round: with 4 ranks, rank 0 holds the stages 0 and 4. In a **V** the stages go down the ranks
# and up again: of *p* ranks, rank *r* holds the stages *r* and 2*p* − 1 − *r*. In the script this is one line of
# `own_stages`:

# %%
excerpt(spec("ZBVZeroBubble", 4), "STAGES", "LOSS_RANK", "own_stages")

# %% [markdown]
# This placement has three consequences.
#
# - **The tip of the V sends nothing.** The last rank holds the two stages in the middle, so one boundary between stages
#   needs no message.
# - **The first rank has the loss**, because it also holds the last stage. Right after the last forward of a micro-batch
#   it starts the backward of the same micro-batch.
# - **Every rank stores about the same amount.** The activations of an early stage are stored for a long time, those of
#   a late stage only briefly, and each rank holds one of each.
#
# **ZB-V** (Qi et al. 2023, section 6) combines the V with split backwards:

# %%
pipe.gantt(pipe.simulate("ZBVZeroBubble", ranks=4, micro_batches=8))

# %% [markdown]
# **Predict:** what is left of the bubble, and what would have to happen in the *next* step for it to disappear?
#
# <details class="answer"><summary>Answer</summary>
#
# No rank waits between its first and its last pass. Rank 0 starts first and is done first; rank 3 starts last and is
# done last. If rank 0 starts the next step at once, the two steps fit together, and the bubble is zero. For that, no
# rank may wait for the others in its optimizer step. Clipping the norm of *all* gradients makes them wait, and so does
# the check for overflow in fp16.
#
# </details>
#
# **DualPipeV** is DualPipe, the schedule of DeepSeek-V3 (2024, section 3.2.1), cut in half. In the middle of the step
# each rank alternates the forward of one micro-batch and the backward of *another*. Neither needs the result of the
# other, so a rank can compute both at the same time: while the messages of one are sent (the all-to-all of its experts,
# for instance), the other computes.

# %%
pipe.gantt(pipe.simulate("DualPipeV", ranks=4, micro_batches=8))

# %% [markdown]
# Torch computes each such pair one after the other unless you register a function of your own for it
# (`register_custom_function`), and so does the picture: it shows the order, but not the gain.
#
# ## Which schedule?
#
# **Predict:** you have 4 ranks and memory for 8 micro-batches. Which schedule would you use? And with 32 micro-batches?

# %%
pipe.bubbles(4)

# %%
pipe.activations(4, 8)

# %% [markdown]
# <details class="answer"><summary>Discussion</summary>
#
# With 32 micro-batches, all schedules have small bubbles, and the simplest is good enough. With 8, the three
# zero-bubble schedules with two stages per rank idle least. They store the activations of about 4 micro-batches on
# *every* rank (1F1B only on the first), because the weight gradients still need them. Of the three, `ZBVZeroBubble` and
# `DualPipeV` send less than `InterleavedZeroBubble`. With 4 micro-batches there are too few to fill the V.
#
# None of this is free: with two stages per rank, the ranks send at least twice as much as with one, and it is harder to
# split the blocks into *eight* equal stages than into four.
#
# </details>
#
# Run them, with two ranks. First the V. With 1F1B there is one boundary between stages, and each rank sent this much:

# %%
print(one_f_one_b.summary()["ranks"][0]["comm_bytes_per_step"] / 2**20, "MiB per step")

# %% [markdown]
# **Predict** the same for `ZBVZeroBubble`. How many boundaries do its four stages have, and how many of them lie
# between two ranks?

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
zbv = run(spec("ZBVZeroBubble", 4)).wait()
pipe.gantt(pipe.measured(zbv))

# %%
my_guess

# %%
zbv.ledger()

# %% [markdown]
# The first stage has no gradient of its inputs to compute, so all of its backward is in the second half. Compare the
# other schedules with two stages per rank:

# %% tags=["long"]
interleaved = run(spec("Interleaved1F1B", 4)).wait()
pipe.gantt(pipe.measured(interleaved))

# %% tags=["long"]
zero_bubble = run(spec("InterleavedZeroBubble", 4)).wait()
pipe.gantt(pipe.measured(zero_bubble))

# %% tags=["long"]
dual = run(spec("DualPipeV", 4)).wait()
pipe.gantt(pipe.measured(dual))

# %% [markdown]
# Here is the simulation of all of them, for equal stages and for the four unequal stages of this model:

# %%
for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
    equal, real = pipe.simulate(schedule, 2, 4).bubble, pipe.planned(spec(schedule, 4)).bubble
    print(f"{schedule:22} {equal:5.0%} with equal stages  {real:5.0%} with these stages")

# %% [markdown]
# ## Exercise: the order of a stage
#
# Write `order(stage, stages, micro_batches)`: what the rank with stage number `stage` (from 0) computes under **1F1B**,
# as a list like `["F0", "F1", "B0", …]`. The forward of every micro-batch comes before its backward, and the rank
# stores the activations of as few micro-batches as possible. Look at each lane of the 1F1B picture: how many forwards
# come before the first backward?


# %% tags=["exercise"]
def order(stage, stages, micro_batches): ...


check("pipeline_parallel.order", order)

# %% [markdown]
# ## Exercise: a small bubble
#
# Train the GPT with `pp` on two ranks, for at least 5 steps, with a bubble of **at most 12 %** by formula. There is
# more than one solution. Make the micro-batches as large as possible: a batch has 16 samples.

# %% tags=["exercise"]
small_bubble = ...  # run("pp", workload="gpt", **HERE, steps=5, samples=200, options={…}).wait()
check("pipeline_parallel.bubble", small_bubble)
