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
# # Choose: will it fit, and which strategy should I use?
#
# You have a model, some GPUs, and a page of advice from the internet. Can you train the model on these GPUs at all?
# With which strategy? And how much of the advice is true? This lab answers the first two questions with arithmetic that
# you can do on paper, compares the arithmetic with real runs, and tests the advice. The cells of this lab compute for
# about 1 minute on two cores.

# %%
from labkit import Spec, advise, atlas, check, on_trial, pictures, place, run

HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks

# %% [markdown]
# ## What training stores: 16 bytes per parameter
#
# Training a model with Ψ parameters needs much more memory than its parameters. With Adam, each parameter costs
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
# Both add up to 16Ψ (Rajbhandari et al. 2020, section 3.1). These are the **model states**, which are stored from step
# to step. With `torch.autocast`, as in the scripts of this lab, the left column applies, and most computations run in
# 16 bits. The **activations** come on top. They depend on the batch, and not only on Ψ.
#
# Before you run the next cell: how many GB are the states of a model with 7B parameters? Do they fit on one GPU with 80
# GB?

# %%
for name in ("1M", "100M", "1B", "7B"):
    spec = Spec("ddp", "gpt", options={"size": name})
    parameters = spec.workload_row.parameters(spec.options)
    print(f"gpt of {name:>4}: {parameters:13,} parameters, states {16 * parameters / 1e9:8.3f} GB")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# About 112 GB. They do not fit on one GPU with 80 GB, before a single sample is processed. The parameters alone, in 16
# bits, take 14 GB. That is why a GPU can run inference with a model that it cannot train.
# </details>
#
# ZeRO and FSDP shard the states across the devices of a group: stage 1 the optimizer state, stage 2 also the gradients,
# stage 3 (FSDP) also the parameters. By formula, for 3B parameters on four devices with 24 GB each:

# %%
pictures.fit.states(3e9, devices=4, memory=24e9)

# %% [markdown]
# ## Formula versus run
#
# Now take a model that any machine can train: the MLP, in 32 bits. First predict, from the table above, what each of
# two ranks stores. Write it down: under DDP, under ZeRO-1, under FSDP2?
#
# Under tensor parallelism (TP), two of the three layers are split, and every rank stores the last one whole.

# %%
mlp = Spec("ddp", "mlp", **HERE)
PSI = mlp.workload_row.parameters({})
LAST = 512 * 10 + 10  # the layer that TP does not split; nor does it split the 512 biases of the second layer
ON_TP = (PSI - LAST - 512) // 2 + LAST + 512
predicted = {
    "ddp": (4 * PSI, 4 * PSI, 8 * PSI),
    "zero1": (4 * PSI, 4 * PSI, 8 * PSI / 2),
    "fsdp2": (4 * PSI / 2, 4 * PSI / 2, 8 * PSI / 2),
    "tp": (4 * ON_TP, 4 * ON_TP, 8 * ON_TP),
}

# %% [markdown]
# Then run all four strategies, one after another. Each is a real run with two ranks.

# %%
jobs = {strategy: run(strategy, workload="mlp", **HERE, steps=6).wait() for strategy in predicted}
figures = {strategy: job.summary()["ranks"][0] for strategy, job in jobs.items()}
print(*jobs.values(), sep="\n")

# %%
MIB = 2**20
print("MiB on rank 0   parameters     gradients      optimizer      (predicted → measured)")
for strategy, formula in predicted.items():
    stored = figures[strategy]["memory_bytes"]
    measured = (stored["parameters"], stored["gradients"], stored["optimizer"])
    cells = (f"{a / MIB:5.2f} → {b / MIB:5.2f}" for a, b in zip(formula, measured))
    print(f"{strategy:14}", "  ".join(cells))

# %% [markdown]
# For three of the four, prediction and measurement agree to two digits. For ZeRO-1 they do not. Why?
#
# <details class="answer"><summary>Answer</summary>
#
# PyTorch's `ZeroRedundancyOptimizer` assigns whole tensors. One matrix of the MLP contains more than half of all
# parameters, so the rank that gets it stores more than half of the optimizer state. A model with many layers of equal
# size is balanced. FSDP2 splits every tensor by rows instead.
# </details>
#
# The states are not the peak. This is the peak memory of a rank within a step, and what the rank sends per step. By
# formula, DDP sends 2 · 4Ψ (n−1)/n bytes, ZeRO-1 (in PyTorch) and FSDP2 1.5 times as much, all in 32 bits. (FSDP2 with
# bf16 parameters sends no more than DDP under autocast: lab 04.)

# %%
print("MiB on rank 0   states   peak   in addition   sent per step")
for strategy, rank in figures.items():
    states = sum(rank["memory_bytes"][owner] for owner in ("parameters", "gradients", "optimizer"))
    peak, sent = rank["peak_memory_bytes"], rank["comm_bytes_per_step"]
    print(f"{strategy:14} {states / MIB:7.2f} {peak / MIB:6.2f} {(peak - states) / MIB:13.2f} {sent / MIB:15.2f}")

# %%
jobs["ddp"].figure("memory_by_owner")

# %% [markdown]
# <details class="answer"><summary>What comes in addition to the states?</summary>
#
# *communication*: DDP stores its gradients a second time, in the buckets that it sends: 4Ψ more, unless
# `gradient_as_bucket_view=True` makes the gradients views of the buckets. FSDP2 gathers a whole
# block while it computes with it. *other*: Adam needs temporary memory during its update. *activations*: little,
# because the MLP and its samples are small. So 16Ψ is a lower bound: leave a margin. On GPUs, the caching allocator and
# the CUDA context need additional memory.
# </details>
#
# TP sends the least here. Does that make it the best?
#
# <details class="answer"><summary>Answer</summary>
#
# No. Its two ranks process 128 samples per step, the others 256. Its communication is exposed: forward and backward
# wait for it. It also grows with the batch, while the gradients of DDP do not. TP is for a fast interconnect within a
# machine. (On CPU ranks, gloo implements a reduce-scatter as an all-reduce, so FSDP2 sends more than the formula says.)
# </details>

# %% [markdown]
# ## Activations scale with the batch
#
# "FSDP halves memory on two GPUs", and "it costs 10 to 20 % on small models". Take the CNN: 405,898 parameters, a batch
# of 128 images per rank. Which of the four owners of memory is halved, and by how much does the total shrink? The next
# cell runs DDP and FSDP2 and gives verdicts.

# %% tags=["long"]
on_trial("fsdp-memory", "fsdp-small", rounds=1)

# %% [markdown]
# <details class="answer"><summary>Why so little?</summary>
#
# This CNN has 6 MiB of states and far more activations. Activations belong to the samples, and FSDP shards none of
# them. What reduces activations is activation checkpointing (`checkpoint_activations`), gradient accumulation
# (`accumulate`), or splitting the computation (tensor or context parallelism). Check which owner is too large before
# you choose the remedy.
# </details>

# %% [markdown]
# ## Which strategy? Compute it
#
# A common rule says: DDP if the model fits on one device, otherwise FSDP, otherwise FSDP with TP within a node,
# otherwise PP between nodes. It ignores the batch, the links and recomputation. `advise` tries every mesh instead, with
# the formulas of this lab. Nothing is run: all of its figures are modelled.
#
# Before you run the next cell: which strategy would you use to train 7B parameters on eight A100 with 80 GB? What does
# DDP lack?

# %%
advise("7B", devices=8, machine="a100x8")

# %% [markdown]
# For which of these cases does the rule choose well? Decide before you run the cell.

# %%
cases = {
    "350M on two T4": {"params": "350M", "machine": "t4x2"},
    "13B on eight H100": {"params": "13B", "devices": 8},
    "70B on 64 H100": {"params": "70B", "devices": 64},
    "70B on 4,096 H100": {"params": "70B", "devices": 4096},
    "the same with 4M tokens per step": {"params": "70B", "devices": 4096, "batch": "4M tokens"},
}
for name, case in cases.items():
    print(f"{name}:", *advise(**case).rule[1:], sep="\n    ")

# %% [markdown]
# <details class="answer"><summary>When does the rule mislead?</summary>
#
# When "it fits" has a price. If a layout fits only with recomputation, it costs a third more computation; splitting the
# activations (CP, TP) may cost less. With FSDP over thousands of devices, each gather of a layer takes thousands of
# messages in a row; smaller groups of shards (HSDP) wait less. And the batch may have fewer samples than there are
# devices: then only TP, PP and CP can use them all.
# </details>
#
# Formulas must be tested as well. The next cell trains the GPT of the lab with one sample per rank, and compares what
# was measured with what `advise` says.

# %%
modelled = advise(workload="gpt", machine="t4x2", precision="fp32", batch=2).to_json()["fits"]
formula = next(layout for layout in modelled if layout["strategy"] == "DDP")["memory_bytes"]
job = run("ddp", workload="gpt", **HERE, batch_size=1, precision="fp32", steps=6).wait()
for owner, measured in job.summary()["ranks"][0]["memory_bytes"].items():
    print(f"{owner:13} modelled {formula.get(owner, 0) / MIB:5.2f} MiB, measured {measured / MIB:5.2f} MiB")

# %% [markdown]
# ## What real GPUs did
#
# No machine here can test the formulas on a cluster, but others published what they measured on theirs. `atlas()` has
# these runs, each with its exact layout and its source, and it has the failures. In the next picture each dot is one
# run: point at it to see which. **Predict:** on the same number of GPUs, how much faster is the best layout of a model
# than the worst that runs? And how many of the runs failed?

# %%
pictures.atlas()

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# On 64 GPUs and more, the best and the worst layout of a model that run are a factor of ten to several hundred apart:
# the layout decides more than the hardware. About half of the runs failed. Those are not accidents: somebody tried
# every layout of three models, and most of the failures are on the right of the dotted line, where the formulas need
# more memory than a GPU has. The others crashed for reasons that a formula does not know.
#
# </details>
#
# `advise` looks for published runs near each of its layouts. Its last table says what they reached, how near they are
# and what differs; if no run is near, it says so. Look again at the advice for 7B above: which of its figures are
# supported by a run on real GPUs?

# %% [markdown]
# ## More devices
#
# What do you gain from more devices? In weak scaling every device keeps its samples, and the batch grows. In strong
# scaling the batch is constant. For 7B parameters: where does each line end, and why? From where on does communication
# take longer than computation?

# %%
advise("7B", devices=64).scaling().figure()

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# A line begins where the states fit, and ends where there are more data-parallel ranks than samples. In strong scaling,
# each device computes less and less, but the communication of a layer shrinks more slowly. A real cluster scales worse:
# the model knows no stragglers, no shared links, and the same efficiency for small matrices as for large ones.
# </details>

# %% [markdown]
# ## Several machines
#
# The same script runs on several machines. Start torchrun **once on each of them**. With a rendezvous, the command is
# the same everywhere. In the older form, each machine gets its number:

# %%
machines = "torchrun --nnodes=2 --nproc-per-node=8"
host, port = "node0.example.org", 29500
print("on each of two machines:")
print(f"  {machines} --rdzv-backend=c10d \\\n    --rdzv-endpoint={host}:{port} --rdzv-id=mine train.py")
for number in (0, 1):
    print(f"or on machine {number}:")
    print(f"  {machines} --node-rank={number} \\\n    --master-addr={host} --master-port={port} train.py")

# %% [markdown]
# - `--nnodes` and `--nproc-per-node`: the world size is their product, here 16. Ranks 0 to 7 are on one machine, 8 to
#   15 on the other; the local ranks are 0 to 7 on both. With `--nnodes=1:4`, the number of machines may vary from one
#   to four.
# - `--rdzv-endpoint`: the **rendezvous**. One machine hosts it: the others must be able to resolve its name, and its
#   port must be open. The processes register there and get their ranks when all have arrived.
# - `--rdzv-id`: distinguishes this job from others that use the same endpoint.
# - `--standalone` is the short form for one machine. The first line of a script that labkit writes contains it.
#
# The port accepts connections from anyone who can reach it, so use a private network. If the ranks wait forever, the
# cause is almost always the host name, a firewall, or the wrong network interface. `NCCL_SOCKET_IFNAME` (or
# `GLOO_SOCKET_IFNAME`) selects the interface, and `NCCL_DEBUG=INFO` prints the one in use.
#
# Which strategy should communicate between machines? Communication in every layer (TP) stays within a machine.
# Communication that happens once per step (DDP, the replicas of HSDP) or is small (PP) may use the slower interconnect.

# %% [markdown]
# ## Claims on trial
#
# These claims are common in tutorials and in answers to questions. Mark each with *holds*, *does not hold* or *it
# depends* before you go on:
#
# 1. The MNIST CNN with three convolutions has 120K parameters.
# 2. With a batch size of 128 on 2 GPUs, each GPU takes 64 samples.
# 3. FSDP synchronises gradients with an all-reduce.
# 4. NCCL works on macOS.
# 5. 2 GPUs are 1.8 to 1.9 times as fast; DDP scales by 1.9, 3.5 and 6 on 2, 4 and 8 GPUs.
# 6. DDP is 20 to 50 % faster than DP on one machine; but DP is better for small models.
# 7. `pin_memory` with `non_blocking` gains 15 to 20 %.
#
# 8. 65B parameters can be trained on 8 GPUs with 80 GB.
# 9. FSDP stores 7B parameters in 28 GB, and in 14 GB on each of two GPUs.
# 10. n GPUs are n / (1 + overhead) times as fast, with one overhead for all n.
# 11. Summing gradients instead of averaging them scales the update with the number of GPUs.
# 12. The optimizer must be created after the model is wrapped.
# 13. Evaluate with `model.module`, not with the DDP wrapper.
# 14. The training accuracy that rank 0 prints is that of the job.
# 15. From 16 GPUs on, FSDP is faster than DDP.
# 16. Tensor parallelism should stay within a node.
# 17. Prefer the largest micro-batch that fits.
# 18. A pipeline needs four times as many micro-batches as stages.
#
# Published runs judge the last four: pairs that differ in one factor only, with everything else equal.
#
# The first cell tests the claims that need no run: 1 to 4, 8 to 18, and nine more. The second cell runs each strategy
# that it needs once, which takes a minute or two. `labkit claims` in a terminal runs each three times, in alternation.
# If this machine cannot decide a claim, the verdict says so: CPU ranks cannot decide claims about GPUs.

# %%
on_trial(quick=True)

# %% tags=["long"]
on_trial(rounds=1)

# %% [markdown]
# A claim with a number is true for one machine, model and batch size. When you read the next one, ask: measured how
# often, on what hardware, and compared with what?

# %% [markdown]
# ## Exercises
#
# **1.** Write the states as a function: the bytes that each of `devices` devices stores in mixed precision with Adam,
# at ZeRO stage 0 (DDP), 1, 2 and 3.

# %% tags=["exercise"]
PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes


def states(parameters, devices, stage): ...


check("choose.states", states)

# %% [markdown]
# **2.** A model with 7 · 10⁹ parameters, eight GPUs with 24 GB each, ZeRO-3, bf16 with Adam. How many GB (10⁹ bytes) do
# the states take on each GPU? Does the model fit?

# %% tags=["exercise"]
gigabytes = ...
check("choose.seven", gigabytes)

# %% [markdown]
# **3.** Each of your two devices has 24 MiB for parameters, gradients, optimizer state and activations. Train the CNN
# there, with a global batch size of at least 256. Six steps are enough: `run(…, **HERE, steps=6).wait()`.

# %% tags=["exercise"]
fits = ...
check("choose.fits", fits)

# %% [markdown]
# **4.** Pick a layout with what you know about memory and links, without running anything. This is the case:

# %%
print(atlas(model="nanotron Llama 8B", gpus=64).question)

# %% [markdown]
# Gradients are accumulated in 32 bits, and nothing is recomputed. Answer with a text such as
# `"dp=8,tp=4,pp=2,zero=1,micro_batch=2"`: dp × tp × pp is the number of GPUs, and `zero` is 0 (DDP) or 1. The runs of
# others say what your layout did on real GPUs. It is right if it reached 85 % of the fastest one.

# %% tags=["exercise"]
layout = ...
check("choose.published", layout)

# %% [markdown]
# When you have answered, look at all layouts of this case. Which ones failed, and which ran and were slow?

# %%
pictures.atlas(model="nanotron Llama 8B", gpus=64, by="tp")
