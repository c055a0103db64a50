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
# # Choose: will it fit, and what should I use?
#
# You have a model, some GPUs, and a page of advice found somewhere. Will the model train there at all? With which strategy? And how
# much of the advice is true? This lab answers the first two with arithmetic that you can do on paper, holds the arithmetic against
# real runs, and puts the advice on trial.

# %%
from dataclasses import replace

from labkit import Spec, check, on_trial, pictures, place, run

HERE = place(2)  # two GPUs where this machine has them, else two CPU ranks

# %% [markdown]
# ## What training keeps: 16 bytes a parameter
#
# A model of Ψ parameters needs far more than room for its parameters. With Adam, each parameter costs
#
# | | in 32 bits | in mixed precision |
# | --- | --- | --- |
# | the parameter | 4 | 2 |
# | its gradient | 4 | 2 |
# | the optimizer: a 32-bit copy | – | 4 |
# | the optimizer: first moment | 4 | 4 |
# | the optimizer: second moment | 4 | 4 |
# | **bytes** | **16** | **16** |
#
# Both come to 16Ψ (Rajbhandari et al. 2020, section 3.1). These are the **states**: they stay from step to step. `torch.autocast`,
# which the scripts of this lab use, keeps the left column, and computes in 16 bits what it can. On top come **activations**, which
# depend on the batch and not on Ψ alone.
#
# Before you run the next cell: how many GB are the states of a model of 7B parameters? Does one GPU of 80 GB hold them?

# %%
for name in ("1M", "100M", "1B", "7B"):
    spec = Spec("ddp", "gpt", options={"size": name})
    parameters = spec.workload_row.parameters(spec.options)
    print(f"gpt of {name:>4}: {parameters:13,} parameters, states {16 * parameters / 1e9:8.3f} GB")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# About 112 GB: one GPU of 80 GB does not hold them, with no sample trained on yet. Parameters alone, in 16 bits, would be 14 GB. That
# is why a model can answer questions on a GPU that is far too small to train it.
# </details>
#
# ZeRO and FSDP divide states among the devices of a group: stage 1 the optimizer's, stage 2 gradients too, stage 3 parameters too.
# By formula, for 3B parameters on four devices of 24 GB:

# %%
pictures.fit.states(3e9, devices=4, memory=24e9)

# %% [markdown]
# ## Formula against run
#
# Now a model that any machine can train: the MLP, in 32 bits. First predict what a rank of two keeps, from the table above. Write it
# down: under DDP, under ZeRO-1, under FSDP2?
#
# Under tensor parallelism (TP) two of the three layers are split, and the last is whole on each rank.

# %%
mlp = Spec("ddp", "mlp", **HERE)
PSI = mlp.workload_row.parameters({})
LAST = 512 * 10 + 10  # the layer that TP leaves whole; the second layer's 512 biases are whole too
ON_TP = (PSI - LAST - 512) // 2 + LAST + 512
predicted = {
    "ddp": (4 * PSI, 4 * PSI, 8 * PSI),
    "zero1": (4 * PSI, 4 * PSI, 8 * PSI / 2),
    "fsdp2": (4 * PSI / 2, 4 * PSI / 2, 8 * PSI / 2),
    "tp": (4 * ON_TP, 4 * ON_TP, 8 * ON_TP),
}

# %% [markdown]
# Then run all four. Each is a real run with two ranks; one waits for the other.

# %%
jobs = {strategy: run(strategy, workload="mlp", **HERE, steps=6).wait() for strategy in predicted}
figures = {strategy: job.summary()["ranks"][0] for strategy, job in jobs.items()}
print(*jobs.values(), sep="\n")

# %%
MIB = 2**20
print("MiB on rank 0   parameters     gradients      optimizer      (predicted → measured)")
for strategy, formula in predicted.items():
    held = figures[strategy]["memory_bytes"]
    measured = (held["parameters"], held["gradients"], held["optimizer"])
    cells = (f"{a / MIB:5.2f} → {b / MIB:5.2f}" for a, b in zip(formula, measured))
    print(f"{strategy:14}", "  ".join(cells))

# %% [markdown]
# Three of the four are right to the second digit. ZeRO-1 is off. Why?
#
# <details class="answer"><summary>Answer</summary>
#
# PyTorch's `ZeroRedundancyOptimizer` hands out whole tensors. The MLP has one matrix with more than half of all numbers, and the rank
# that takes it steps more than half. A model of many layers of one size comes out even. FSDP2 cuts every tensor in rows instead.
# </details>
#
# The states are not the peak. Here is what a rank held at the worst moment of a step:

# %%
print("MiB on rank 0   states   peak   beyond the states")
for strategy, rank in figures.items():
    states = sum(rank["memory_bytes"][owner] for owner in ("parameters", "gradients", "optimizer"))
    peak = rank["peak_memory_bytes"]
    print(f"{strategy:14} {states / MIB:7.2f} {peak / MIB:6.2f} {(peak - states) / MIB:10.2f}")

# %%
jobs["ddp"].figure("memory_by_owner")

# %% [markdown]
# <details class="answer"><summary>What is beyond the states?</summary>
#
# *communication*: DDP keeps its gradients a second time, in buckets that it sends; 4Ψ more. FSDP2 gathers a block whole while it
# computes with it. *other*: Adam needs room for a moment while it steps. *activations*: little, for the MLP is small and each of its
# samples too. So 16Ψ is the least that is needed: leave a margin. On GPUs the caching allocator and CUDA's own context take some more.
# </details>

# %% [markdown]
# ## Activations follow the batch
#
# "FSDP halves memory on two GPUs", and "it costs 10 to 20 % on small models". Take the CNN: 405,898 parameters, a batch of 128 images a
# rank. Which of the four owners halves, and by what does the whole shrink? The next cell runs DDP and FSDP2, and gives verdicts.

# %%
on_trial("fsdp-memory", "fsdp-small", rounds=1)

# %% [markdown]
# <details class="answer"><summary>Why so little?</summary>
#
# This CNN has 6 MiB of states and far more activations, and those belong to the samples: FSDP shards none of them. What shrinks
# activations is to compute them again (`checkpoint_activations`), to take the batch in parts (`accumulate`), or to split what is
# computed (tensor or context parallelism). Look which owner is too large before you choose the remedy.
# </details>

# %% [markdown]
# ## The usual table, tried
#
# | strategy | take it when | keeps, of the states | sends in a step |
# | --- | --- | --- | --- |
# | DDP | everything fits on one device | all | 2 · 4Ψ (n−1)/n |
# | ZeRO-1 | Adam's part is too much | parameters, gradients, 1/n of the rest | half as much again, by PyTorch's way |
# | FSDP2, ZeRO-3 | the states are too much | 1/n | half as much again |
# | TP | a layer or its activations are too much | 1/n of what is split | activations, in every layer |
# | PP | there are several machines, the wire between them slow | its own layers | activations, between stages |
# | DP | hardly ever: PyTorch's documentation advises DDP, on one machine too | all, and more on device 0 | everything, through device 0 |
#
# The four runs above say what was really sent. (On CPU ranks gloo does a reduce-scatter as an all-reduce, which costs FSDP2 more than
# the formula: `jobs["fsdp2"].ledger()` has both.)

# %%
for strategy, rank in figures.items():
    sent = rank["comm_bytes_per_step"]
    print(f"{strategy:6} sends {sent / MIB:6.2f} MiB a rank and step: {sent / figures['ddp']['comm_bytes_per_step']:.2f} × DDP")

# %%
jobs["fsdp2"].ledger()

# %% [markdown]
# TP sends the least here. Is it the best, then?
#
# <details class="answer"><summary>Answer</summary>
#
# Its two ranks learn from 128 samples at a step, the others from 256; and what TP sends, forward and backward have to wait for. With
# a longer batch it grows, where the gradients of DDP do not. It is for a fast wire inside a machine.
# </details>

# %% [markdown]
# ## The same as a tree
#
# The advice is one function: questions in a fixed order, each with a formula. Remember the order, and you need no table: *does it fit?
# if not, what is too much? and over which wire would it go?*

# %%
Case, tree, advise = pictures.fit.Case, pictures.fit.tree, pictures.fit.advise
model = Case(parameters=5e9, memory=24e9, activations=9e9, least=2e9, block=0.4e9, devices=8)
tree(model)

# %% [markdown]
# Before you run the next cell: what will it say to the same model in each of these places?

# %%
cases = {
    "two such machines": {"machines": 2},
    "eight devices of 80 GB": {"memory": 80e9},
    "one device": {"devices": 1},
    "13B, two machines, a slow wire": {"parameters": 13e9, "machines": 2},
    "13B, two machines, a fast wire": {"parameters": 13e9, "machines": 2, "fast": True},
}
for where, change in cases.items():
    print(f"{where:32} {advise(replace(model, **change))}")

# %% [markdown]
# Now hold the tree against the runs. Imagine devices somewhat larger and somewhat smaller than DDP's peak, ask the tree for the MLP, and
# look whether the run that it names would have fitted. Ask twice: first with activations alone on top of the states, then with all
# that was measured beyond the states.

# %%
runs_of = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP2": "fsdp2"}
ddp = figures["ddp"]
activations, peak = ddp["memory_bytes"]["activations"], ddp["peak_memory_bytes"]
for beyond in (activations, peak - 16 * PSI):
    for memory in (1.5 * peak, 0.92 * peak, 0.8 * peak):
        said = advise(Case(PSI, memory, beyond, devices=2, recipe="fp32", block=4 * 784 * 512)).use
        real = figures[runs_of[said]]["peak_memory_bytes"] if said in runs_of else 0
        verdict = "not run here" if not real else "fits" if real <= memory else "does not fit"
        print(f"{beyond / MIB:5.1f} MiB beyond, device of {memory / MIB:5.1f} MiB: {said}, {verdict} ({real / MIB:.1f} MiB)")

# %% [markdown]
# <details class="answer"><summary>Where the tree is wrong, why?</summary>
#
# With activations alone it forgets DDP's buckets, which are another 4Ψ, and what Adam needs while it steps. A formula from a paper
# counts what the paper is about. Measure one step of a small run, and give the tree what you found.
# </details>

# %% [markdown]
# ## Several machines
#
# On several machines the same script runs, and torchrun is started **once on each of them**. With a rendezvous the line is the same
# everywhere; in the older form each machine is told its number:

# %%
machines = "torchrun --nnodes=2 --nproc-per-node=8"
host, port = "node0.example.org", 29500
print("on each of two machines:")
print(f"  {machines} --rdzv-backend=c10d \\\n    --rdzv-endpoint={host}:{port} --rdzv-id=mine train.py")
for number in (0, 1):
    print(f"or on machine {number}:")
    print(f"  {machines} --node-rank={number} \\\n    --master-addr={host} --master-port={port} train.py")

# %% [markdown]
# - `--nnodes` and `--nproc-per-node`: the world size is their product, here 16. Ranks 0 to 7 are on one machine, 8 to 15 on the
#   other; the local rank is 0 to 7 on both. `--nnodes=1:4` takes one to four machines, as they come and go.
# - `--rdzv-endpoint`: the **rendezvous**. One machine is the meeting point: its name must be reachable from the others, and its port
#   open. The others ask there how many have come, and get their ranks when all are there.
# - `--rdzv-id`: tells this job from another that meets at the same place.
# - `--standalone` is the short form for one machine; the first line of a script that labkit writes has it.
#
# The port is open to all who can reach it, so this belongs into a private network. If the ranks wait for ever, it is nearly always the
# name, a firewall, or the wrong network: `NCCL_SOCKET_IFNAME` (or `GLOO_SOCKET_IFNAME`) names the right interface, and `NCCL_DEBUG=INFO`
# says which one was taken.
#
# Which strategy goes between machines? What is sent in every layer (TP) stays inside a machine; what is sent once a step (DDP, the
# replicas of HSDP) or is small (PP) may go over the slower wire.

# %% [markdown]
# ## Claims on trial
#
# These are commonly said, in tutorials and in answers to questions. Mark each with *holds*, *does not hold* or *it depends* before you
# go on:
#
# 1. The MNIST CNN of three convolutions has 120K parameters.
# 2. With a batch size of 128 on 2 GPUs each takes 64.
# 3. FSDP synchronises gradients by all-reduce.
# 4. NCCL works on macOS.
# 5. 2 GPUs give 1.8 to 1.9 times the speed; DDP scales 1.9, 3.5 and 6 times on 2, 4 and 8 GPUs.
# 6. DDP is 20 to 50 % faster than DP on one machine; but DP is better for small models.
# 7. `pin_memory` with `non_blocking` gives 15 to 20 %.
#
# The first cell tries what needs no run: 1 to 4. The other makes a run of each that is needed, and takes a minute or two; `labkit claims`
# in a terminal makes three of each, in turns. What this machine cannot decide, it says so: CPU ranks do not decide what is said of GPUs.

# %%
on_trial(quick=True)

# %% tags=["long"]
on_trial(rounds=1)

# %% [markdown]
# A claim with a number in it is true of one machine, model and batch. When you read the next one, ask: measured how often, on what,
# and against what?

# %% [markdown]
# ## Exercises
#
# **1.** Write the states as a function: bytes that one of `devices` devices keeps in mixed precision with Adam, at ZeRO stage 0 (which
# is DDP), 1, 2 and 3.

# %% tags=["exercise"]
PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes


def states(parameters, devices, stage): ...


check("choose.states", states)

# %% [markdown]
# **2.** A model of 7 · 10⁹ parameters, eight GPUs of 24 GB, ZeRO-3, bf16 with Adam. How many GB (10⁹ bytes) do the states take on each
# GPU? Does the model fit?

# %% tags=["exercise"]
gigabytes = ...
check("choose.seven", gigabytes)

# %% [markdown]
# **3.** Your two devices have 24 MiB each for parameters, gradients, optimizer state and activations. Train the CNN there, with 256
# samples in all at a step, no fewer. Six steps are enough: `run(…, **HERE, steps=6).wait()`.

# %% tags=["exercise"]
fits = ...
check("choose.fits", fits)
