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
# # Precision and memory: what a number costs
#
# "We train in bf16, so everything takes half." **Which numbers of a step does that halve: those that are stored, sent,
# or computed with? And what must stay in 32 bits, or training stops learning?**
#
# [Lab 18](18_one_device.py) counts bytes per parameter. In this lab you measure why they are needed: which updates and
# gradients get lost, what FSDP2's policy stores, sends and computes in which format, and what 8 bits change. Then you
# exchange memory for computation and transfers, and see what a compiler makes of distributed training.
#
# This lab takes about 60 minutes. Its cells compute for about 3 minutes on two cores, and a check for up to a minute.

# %%
import torch

from labkit import Spec, check, explain, guess, pictures, predict, run, starter

# %load_ext labkit
HERE = {"nproc": 2, "device": "cpu"}

# %% [markdown]
# ## Formats: range and digits
#
# A floating-point number has a sign, an exponent, which sets the *range*, and a mantissa, which sets the *digits*.
# 16 bits can go to either. 8 bits are too few for both, so there are two formats: e4m3 with 4 bits of exponent and 3 of
# mantissa, and e5m2 (Micikevicius et al. 2022, *FP8 formats for deep learning*).
#
# **Predict** for each format: what becomes of 0.1, of 10⁻⁸ (a small gradient), of 10⁵ (a large one), and of 1.001?

# %%
FORMATS = {
    **{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
    **{"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2},
}
for name, dtype in FORMATS.items():
    limits = torch.finfo(dtype)
    stored = [f"{torch.tensor(number).to(dtype).item():10.4g}" for number in (0.1, 1e-8, 1e5, 1.001)]
    print(f"{name:9} {limits.bits // 8} bytes, up to {limits.max:7.2g}, next to 1: {1 + limits.eps:10.8g} ", *stored)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# bf16 has the range of fp32 and 2 to 3 decimal digits. fp16 has one digit more, and turns 10⁻⁸ into 0 and 10⁵ into
# infinity. e4m3 has no infinity: a cast beyond 448 gives 448 in this version of torch (others give NaN), so that
# tensors are scaled before they are cast. e5m2 has the range of fp16, and one bit of mantissa less than e4m3.
#
# </details>
#
# ## Small updates: why a copy in 32 bits
#
# Next to a weight *w*, bf16 numbers are about *w*/128 apart. An update that is smaller than half of that is rounded
# away, and the next one again. The cell trains the same student twice, with Adam: once with parameters and update in
# bf16, once with an fp32 copy, the **master weights**, of which the model computes with a bf16 copy (Micikevicius et
# al. 2018, *Mixed precision training*).
#
# **Predict:** both lose digits in forward and backward. Whose loss is lower after 400 steps, and by which factor? How
# many of the weights does one late step change at all?


# %%
def student(with_master, steps=400):
    torch.manual_seed(0)
    inputs, teacher = torch.randn(512, 64), torch.randn(64, 64) / 8
    targets = inputs @ teacher
    weight = torch.zeros(64, 64, dtype=torch.float32 if with_master else torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-6)
    for _ in range(steps):
        before = weight.detach().clone()
        loss = ((inputs.bfloat16() @ weight.bfloat16()).float() - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    changed = (weight != before).float().mean()
    return loss.item(), changed.item()


# %% [markdown]
# Both start from the same weights and see the same samples:

# %%
for with_master in (False, True):
    loss, changed = student(with_master)
    print(f"{'fp32 master' if with_master else 'bf16 only':12} loss {loss:.6f}, {changed:4.0%} of the weights change")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# With bf16 only, most weights have stopped moving although the gradient is not zero. Adam's step is about the learning
# rate, whatever the gradient, and where the distance of neighbouring numbers is larger than twice that, nothing
# happens. The digits that forward loses average out over samples. Those that the update loses add up over steps.
# Another remedy is *stochastic rounding*, which rounds up with the probability of the remainder.
#
# </details>
#
# ## Loss scaling: why fp16 needs it and bf16 does not
#
# The gradients of a loss that is a mean are small. Below 6 · 10⁻⁸, fp16 has only 0. If the loss is multiplied by *S*
# before backward, all gradients are, and the update divides by *S* in fp32. Too large a scale overflows instead: then
# the step is skipped and *S* halved.
#
# **Predict:** from which scale on are almost no gradients 0? At which one does something overflow? Is there a scale
# at which neither happens?

# %%
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).half()
inputs = torch.randn(256, 64).half()
for exponent in range(0, 49, 6):
    model.zero_grad()
    loss = model(inputs).float().square().mean() / 1e4
    (loss * 2.0**exponent).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    zeros, infinite = (gradients == 0).float().mean(), (~gradients.isfinite()).float().mean()
    print(f"scale 2^{exponent:<2}  {zeros:6.1%} of the gradients are 0, {infinite:6.1%} are not finite")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Without a scale everything is lost. Between the two limits lies a range of many powers of 2. It is narrower if the
# gradients of layers differ more, and it moves while the loss falls: so `torch.amp.GradScaler` raises the scale after
# 2,000 good steps, and halves it after an overflow. bf16 has the exponents of fp32, and needs none of this.
#
# </details>
#
# With several ranks, one question remains, and the exercise comes back to it: *who decides that a step is skipped?* If
# only the rank whose gradients overflowed skips it, the replicas differ from then on.
#
# ## Stored, sent, computed: the policy of FSDP2
#
# `MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)` says in which format parameters are gathered and computed with,
# and in which one gradients are reduced. The picture follows the numbers of one step; a box is as high as a number has
# bytes. It is drawn by rule, and the next cells measure it.

# %%
pictures.precision.flow(param="bf16", reduce="fp32")

# %% [markdown]
# **Predict**, for each of the three policies of the next cell: the format of the shard that a rank stores, of the
# weight that forward sees, of the gradient that the optimizer sees, and the bytes that a rank sends. The model has
# 262,144 parameters; one pass of them in fp32 between two ranks sends 512 KiB per rank.


# %%
# %%torchrun 2
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

SHARD = {"_allgather_base_": 1, "_reduce_scatter_base_": 0}  # the argument that has the bytes of one shard


class Sent(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func._schema.name.removeprefix("c10d::")) in SHARD:
            sent.append(args[SHARD[name]].nbytes)
        return func(*args, **(kwargs or {}))


low, single = torch.bfloat16, torch.float32
for param, reduce in ((single, single), (low, single), (low, low)):
    policy, sent, seen = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce), [], []
    layer = torch.nn.Linear(512, 512, bias=False, device=device)
    fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    layer.register_forward_pre_hook(lambda layer, inputs, seen=seen: seen.append(layer.weight.dtype))
    with Sent():
        layer(torch.randn(8, 512, device=device)).float().square().mean().backward()
    formats = ", ".join(str(kind)[6:] for kind in (layer.weight.dtype, *seen, layer.weight.grad.dtype))
    report(**{f"param {param}, reduce {reduce}".replace("torch.", ""): f"{formats}; {sum(sent) >> 10} KiB"})

# %% [markdown]
# <details class="answer"><summary>Answer: stored, seen by forward, gradient, sent</summary>
#
# What is *stored* stays in fp32 under every policy: the shard is the master copy, and its gradient and Adam's moments
# have the same format. What is *computed with* is `param_dtype`. *Sent* are two all-gathers in `param_dtype` and one
# reduce-scatter in `reduce_dtype`: 3 · 512 KiB, then 512 + 512, then 768. (A ring sends these bytes. gloo implements a
# reduce-scatter as an all-reduce, and sends twice as many.)
#
# A root module keeps its parameters from forward to backward unless `reshard_after_forward=True`, which saves the
# second all-gather.
#
# </details>
#
# `reduce_dtype=torch.float32` is what the lab's scripts use. The sum over *n* ranks in bf16 rounds at every addition of
# the ring, so its error grows with *n*.
#
# Now the whole run of a GPT with 1,073,536 parameters. **Predict** the MiB that a rank sends per step in bf16. The lab
# traces the script and predicts as well. Does your number agree with either?

# %%
GPT = {**HERE, "workload": "gpt", "samples": 32, "batch_size": 4, "steps": 4}
expected = predict(Spec("fsdp2", **GPT, precision="bf16")).to_json()["ranks"][0]

# %%
my_guess = guess("sent_mb", ...)  # MiB per rank and step
jobs = {kind: run("fsdp2", **GPT, precision=kind).wait() for kind in ("fp32", "bf16")}
my_guess

# %%
for kind, job in jobs.items():
    rank = job.summary()["ranks"][0]
    owners = {name: f"{count / 2**20:.1f}" for name, count in rank["memory_bytes"].items()}
    print(f"{kind}: {rank['comm_bytes_per_step'] / 2**20:.1f} MiB sent, memory in MiB by owner: {owners}")
print(f"bf16, by the trace of the script: {expected['comm_bytes_per_step'] / 2**20:.1f} MiB sent")

# %% [markdown]
# <details class="answer"><summary>Which of them were halved?</summary>
#
# The all-gathers, from 4.1 to 2.0 MiB, and most activations. Gradients are still reduced in fp32 (4.1 MiB, because gloo
# sends a reduce-scatter as an all-reduce; a ring would send half), and the states have not changed: a quarter less
# traffic, not half.
#
# A CPU without bf16 instructions computes bf16 products slowly: bytes are measured here, and speed is not.
#
# </details>
#
# ## 8 bits: a scale for every tensor
#
# In fp8, inputs and weights of a matrix product are cast to e4m3, after a division by a **scale** that maps the largest
# number of the tensor to 448; the product adds up in fp32 and multiplies with both scales. Gradients, which vary more,
# get e5m2. Weights, sums and the optimizer stay as before: fp8 is a format of *computing*, and of sending at most.
#
# **Emulated here:** this cell rounds to fp8 and multiplies in fp32. A GPU with fp8 units (H100 and later) multiplies
# the 8-bit numbers themselves, twice as fast as bf16 by data sheet.
#
# **Predict** the error of a product with 3 bits of mantissa. What happens to it in the other rows if *one* number of
# the inputs is 1,000 times the size of the rest, or 100,000 times? Would e5m2 do better? Would a scale for each row?


# %%
def rounded(x, dtype, dim=None):
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


# %% [markdown]
# Three ways to choose the scale, without an outlier and with two sizes of one:

# %%
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
torch.manual_seed(0)
inputs, weight = torch.randn(256, 512), torch.randn(512, 256) / 512**0.5
ways = {"a scale per tensor, e4m3": (E4M3, None), "a scale per tensor, e5m2": (E5M2, None)}
for name, (dtype, dim) in {**ways, "a scale per row, e4m3": (E4M3, 1)}.items():
    errors = []
    for largest in (1, 1e3, 1e5):
        x = inputs.clone()
        x[0, 0] = largest
        right, got = x @ weight, rounded(x, dtype, dim) @ rounded(weight, E4M3)
        errors.append(((got - right)[1:].norm() / right[1:].norm()).item())
    print(f"{name}: error in the other rows {errors[0]:.1%}; outlier 1e3: {errors[1]:.1%}; 1e5: {errors[2]:.1%}")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# About 4 % per product in e4m3, which training tolerates like the noise of a small batch. An outlier pushes everything
# else down. e4m3 stands a factor of 1,000, because its exponent absorbs it; at 100,000 most numbers fall below the
# smallest one with all digits. e5m2 has fewer digits and more range: worse without the outlier, and indifferent to it,
# which suits gradients. Smaller units, each with a scale, contain the damage: DeepSeek-V3 (2024, section 3.3) has
# scales for 1 × 128 activations and 128 × 128 weights.
#
# What is stored, sent and computed with in fp8 training, as in torchao: stored fp32 or bf16 weights; sent fp8
# all-gathers, if you choose so; computed fp8 products, everything else in bf16.
#
# </details>
#
# ## Activations: store, recompute, or move
#
# Parameters and states can be sharded over ranks. Activations belong to the samples of a rank. Three remedies exchange
# them for something else:
#
# | | stored | price |
# | --- | --- | --- |
# | recompute a block (*full*) | its input | its forward once more |
# | recompute some operators (*selective*) | what is expensive to compute | the cheap operators once more |
# | offload | nothing on the device | two transfers |
#
# The script has the four ways as functions of a few lines. **Read** `activations.py` and **predict** the MiB of
# activations of each way. A block stores its input (1 MiB), `up` and the output of GELU (4 MiB each).

# %%
script = starter("precision.recompute")
print(script, "is next to this notebook:", len(script.read_text().splitlines()), "lines")

# %%
for way in ("stored", "full", "selective", "offload"):
    job = run(script, nproc=1, device="cpu", args=(way,)).wait()
    rank = job.summary()["ranks"][0]
    activations, peak = rank["memory_bytes"]["activations"], rank["peak_memory_bytes"]
    print(f"{way:10} activations {activations / 2**20:5.1f} MiB, peak {peak / 2**20:5.1f} MiB")

# %%
job.figure("memory_of_step")  # of the last run: offload

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# *full* stores 4 of 36 MiB, and its peak is higher than that: while a block is recomputed, its activations exist.
# *selective* drops the output of GELU and the sum, which cost no matrix product, but stores the output of `down`, which
# backward did not need: a policy has to know what backward uses. *offload* stores next to nothing.
#
# Is offloading worth it? Moving *B* bytes there and back takes 2 B / bandwidth, and recomputing takes FLOPs / peak. Per
# hidden number of `up`: 4 bytes stored, 2 · 128 FLOPs. On an H100 with 50 GB/s over PCIe and 400 TFLOP/s, by formula,
# moving takes 0.16 ns and recomputing 0.0006 ns. Offloading pays off if it overlaps with computation, or for states,
# which no computation brings back (`CPUOffloadPolicy`).
#
# </details>
#
# ## A memory snapshot: which line holds it
#
# A sum by kind does not say which *line* of a script holds the memory. On CUDA, the allocator can: between
# `torch.cuda.memory._record_memory_history()` and `_dump_snapshot("memory.pickle")` it writes down each block that it
# hands out and gets back, with the stack of that moment. That is what to do first when a job runs out of memory after
# an hour.
#
# The next cell writes such a snapshot next to this notebook. It is **recorded, not from this machine**: torch's own
# allocator on a simulated device, which computes nothing. Of the script:
#
# ```python
#     def forward(self, x):                                                                    # of a Block
#         return self.reduce(torch.relu(self.expand(x)))                                       # line 15
#
# model = nn.Sequential(Block(128), Block(128), nn.Linear(128, 10)).to("cuda")                 # line 19
# optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# losses = []
# for step in range(10):
#     x = torch.randn(512, 128).to("cuda")                                                     # line 23
#     target = torch.zeros(512, dtype=torch.long).to("cuda")                                   # line 24
#     loss = nn.functional.cross_entropy(model(x), target)                                     # line 25
#     losses.append(loss)                                                                      # line 26
#     loss.backward(retain_graph=True)                                                         # line 27
#     optimizer.step()                                                                         # line 28
#     optimizer.zero_grad()                                                                    # line 29
# ```
#
# **Predict**: what grows from step to step, and by how many MiB? On which line were those blocks allocated, and which
# line is to blame?

# %%
snapshot = starter("precision.snapshot")
explain(snapshot)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Memory in use grows by 2.8 MiB per iteration, 2.5 MiB of them from line 15: for each `Block` the output of the ReLU
# (512 · 512 numbers, which backward of the ReLU and of `reduce` need) and that of `reduce` (512 · 128, the input of
# what follows). But line 15 is innocent: it allocates, and somebody else holds. `losses` keeps each loss with its
# graph, and a graph holds what backward needs. Backward frees that, except with `retain_graph=True`. Without it, line
# 26 would cost a few bytes per step; with `losses.append(loss.item())`, nothing at all.
#
# So a snapshot says who has **allocated** what is in use. Who holds it is for you to find, and three shapes help: a
# block of each step that never ends is a leak; a high and narrow peak is one large tensor, such as logits; many blocks
# that end together are activations, and recomputation helps.
#
# *Reserved* is more than *in use*: the allocator gets segments from the device and cuts blocks out of them. Free memory
# between blocks in use, which no larger block fits into, is fragmentation: `expandable_segments:True`, in
# `PYTORCH_CUDA_ALLOC_CONF`, avoids most of it (torch's notes on CUDA semantics).
#
# </details>
#
# ## `torch.compile` with DDP, FSDP2 and TP
#
# `torch.compile` turns Python into graphs, and a backend makes kernels of them. It fuses chains of element-wise
# operators, so that their intermediate results are never written to memory. Here the backend only counts the graphs,
# because compiling kernels takes longer than a lab.
#
# Communication sets limits to a graph. DDP starts the all-reduce of a bucket when its gradients are ready. If backward
# were a single graph, all of them would be ready at its end.
#
# **Predict** the number of graphs of a model with four blocks of 1 MiB: with DDP and buckets of 25 MiB, of 1 MiB; with
# FSDP2, whose hooks gather and free each block; with TP. In which of them is communication inside a graph?
#
# The ranks stay for the next cells ([keep ranks](../labkit/reference/keep-ranks.md)). First the model:


# %%
# %%torchrun 2 --keep
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# %%
# %%ranks
import torch._dynamo as dynamo

torch._logging.set_logs(all=40)  # errors only


def graphs_of(model):
    graphs = []

    def count(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward  # runs the operators as they are

    dynamo.reset()
    torch.compile(model, backend=count)(torch.randn(8, 256)).sum().backward()
    return graphs


# %% [markdown]
# DDP, with two sizes of buckets:

# %%
# %%ranks
for mb in (25, 1):
    graphs = graphs_of(torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=mb))
    print(f"DDP, buckets of {mb} MiB: {len(graphs)} graphs with {[len(graph) for graph in graphs]} operators")

# %% [markdown]
# FSDP2 shards each block and then the rest; TP splits the two matrices of each block:

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = dist.init_device_mesh("cpu", (2,))
sharded, split = Model(), Model()
for unit in (*sharded.blocks, sharded):
    fully_shard(unit, mesh=mesh)
for block in split.blocks:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

# %%
# %%ranks
for name, model in {"FSDP2": sharded, "TP": split}.items():
    graphs = graphs_of(model)
    inside = sum(graph.count("redistribute") for graph in graphs)
    print(f"{name}: {len(graphs)} graphs with {[len(graph) for graph in graphs]} operators, {inside} × redistribute")

# %%
# %ranks stop

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# - **DDP**: the compiler (its `DDPOptimizer`) cuts the graph where a bucket ends, so that each all-reduce starts while
#   the next piece of backward computes. The first bucket has 1 MiB, whatever the limit ([lab 03](03_ddp.py)): two
#   pieces. With buckets of 1 MiB there are four. Smaller buckets overlap more, and fuse less.
# - **FSDP2**: its hooks stay outside. Blocks are compiled one by one, and equal blocks share a graph (two, because
#   the input of the first block needs no gradient). That is why torchtitan compiles each block before it shards it.
# - **TP**: one graph, with the redistributions of DTensor inside. So a compiler can move other operators between them
#   and overlap them (asynchronous TP; on GPUs, with symmetric memory).
#
# Graphs and their breaks are the same on every device. What only a GPU shows: how much time fusion saves, CUDA graphs,
# and whether communication really overlaps. The reference is the documentation of `torch.compile`, and of
# `DDPOptimizer` in the design notes of DDP.
#
# </details>
#
# ## Exercise: what FSDP2 stores and sends
#
# Write `fsdp2(parameters, ranks, param, reduce, reshard)`: two numbers of bytes per rank, for a model with fp32
# parameters and Adam. What is *stored* between two steps, and what is *sent* in one step by rings? `param` and `reduce`
# are the bytes of `param_dtype` and `reduce_dtype`; `reshard` is `reshard_after_forward`.


# %% tags=["exercise"]
def fsdp2(parameters, ranks, param, reduce, reshard): ...


check("precision.bytes", fsdp2)

# %% [markdown]
# ## Exercise: the peak of a snapshot
#
# Write what such a page begins with. `trace` is the list of events of one device, as in
# `pickle.load(…)["device_traces"][0]` of a snapshot of your own (never unpickle a stranger's: `explain` reads it
# without executing anything). An event is a dict:
#
# - `action`: `"alloc"` for a block that is handed out; `"free_requested"` and `"free_completed"` for one that comes
#   back, when Python releases it and when no stream uses it any more; `"segment_alloc"` for memory that the allocator
#   gets from the device
# - `addr` and `size` in bytes. An address is used again for other blocks; a free of a block that you have not seen is
#   one from before the recording
# - `frames`: the stack, the innermost call first, each a dict with `filename`, `line` and `name`
#
# Return the largest number of bytes in use, counted until `free_completed`, and a dict with the bytes of each line at
# that moment (the first, if there are several). The line is that of the first frame in a file `train.py`, or `None`
# without one.


# %% tags=["exercise"]
def at_the_peak(trace): ...


check("precision.snapshot", at_the_peak)

# %% [markdown]
# ## Exercise: a mixed-precision step
#
# Write the class. It gets a model with fp32 parameters, equal on both ranks, and turns it into fp16.
# `make_optimizer(parameters)` makes Adam. After each forward, `step(loss)` is called with the loss of this rank, which
# is a mean over its samples.
#
# The check trains on two ranks with inputs, parameters and a scale that it draws. Gradients are too small for fp16
# without the scale, and overflow on *one* rank in some steps. Such a step must change nothing but the scale, which is
# halved (it never grows here). It measures:
#
# - the losses, and the parameters after the last step: those of a single device
# - the formats of all matrix products, and of what the optimizer updates
# - bytes sent: one all-reduce of the gradients in fp16 per step
# - bytes stored between two steps: 14 per parameter. **Predict** which ones those are.


# %% tags=["exercise"]
class MixedPrecision:
    def __init__(self, model, make_optimizer, scale):
        # copies in fp32, the optimizer, and model.half()
        ...

    def step(self, loss):
        # backward with the scale, reduce, decide, update, copy back
        ...


check("precision.step", MixedPrecision)

# %% [markdown]
# ## Exercise: recompute under a limit
#
# Write `forward(blocks, x, limit)`. It passes `x` through the blocks, and returns the output of the last one. After it,
# at most `limit` bytes of new tensors may exist; and backward may recompute no more than it has to, by the operations
# of matrix products.
#
# A block is a `Sequential` of `Linear` layers of different widths, with one function between them: `ReLU`, whose
# backward needs its output, or `GELU`, whose backward needs its input. `x` has the shape (tokens, width). The check
# draws seven blocks and a limit, twice. No rule of thumb finds the best choice in them: **predict** for one block what
# it stores, and what it costs to run it again (the last product need not be repeated). Then search all choices.
#
# The gradients must be exact, so that storing in 16 bits is no way out; and files, byte strings and products that are
# written as sums are noticed.


# %% tags=["exercise"]
def forward(blocks, x, limit):
    # torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for those that are recomputed
    ...


check("precision.recompute", forward)

# %% [markdown]
# ## Summary
#
# | numbers | stored | sent | computed |
# | --- | --- | --- | --- |
# | parameters | fp32 shard (master) | `param_dtype`, twice per step | bf16, or fp8 with a scale |
# | activations | `param_dtype`, or recomputed, or moved | – (TP, PP: as computed) | bf16 |
# | gradients | fp32 shard, until the update | `reduce_dtype` | bf16 |
# | sums: products, losses, norms | – | – | fp32 |
# | optimizer | fp32 shard | – | fp32 |
#
# Low precision halves what is sent and computed with. What is stored from step to step, the master copy and the
# moments, keeps its digits, because errors there add up.
