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
# # Clusters and links: what connects GPUs, and what that means for a job
#
# **The same script on the same 64 GPUs: with one layout, communication hardly shows; with another one, the GPUs wait
# most of the time. Which link does each byte cross, how fast is it, and how do processes on different machines find
# each other?**
#
# This lab takes about 40 minutes. Its cells compute for about 1 minute on two cores. This machine has no such links,
# so figures of GPUs are *modelled*, from the tables that the lab's predictions use. What is measured says so.

# %%
import json
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from labkit import advise, atlas, check, on_trial, pictures

# %load_ext labkit

# %% [markdown]
# ## The links
#
# | link | connects | |
# | --- | --- | --- |
# | PCIe | GPU, host, network adapter | shared by what is below the same switch |
# | NVLink | GPUs, directly | T4 and most cards for workstations have none |
# | NVSwitch | the NVLinks of a node, or of a rack (GB200 NVL72) | each GPU reaches all others at full speed at once |
# | InfiniBand, RoCE | nodes | in large clusters one adapter per GPU (a *rail*); TCP over Ethernet is slower |
#
# A **domain** of NVLink is where it reaches: eight GPUs of one node up to Hopper, and the 72 GPUs of a whole rack,
# which are 18 nodes, in a GB200 NVL72 (Blackwell). "Within a node" and "over NVLink" are no longer the same.
#
# Here are two nodes of eight GPUs. The NICs with the same number are connected by one switch, their rail. **Predict**
# which links tensor parallelism uses within the nodes, and data parallelism across them:

# %%
pictures.nodes.rails({"dp": 2, "tp": 8}, "tp")

# %%
pictures.nodes.rails({"dp": 2, "tp": 8}, "dp")

# %% [markdown]
# **Try it:** `{"tp": 16}`, along `tp`. How many of the NICs are in use?
#
# **Predict:** by what factor is NVLink 4 faster than InfiniBand NDR, per GPU and direction? (`nvidia-smi topo -m`
# prints what connects your own GPUs.) Hover over a bar for its source.

# %%
pictures.links.bandwidths()

# %% [markdown]
# ## Algorithm bandwidth, bus bandwidth
#
# A benchmark reports two figures for a message of M bytes. The **algorithm bandwidth** is M / time. The **bus
# bandwidth** multiplies it by what each link must carry per byte, for an all-reduce 2 (n − 1) / n. **Predict:** with
# four ranks instead of two, which of the two figures would stay the same if each rank had a separate link?


# %%
# %%torchrun 4 --as timed
def best(group, repeats=4):
    x, took = torch.zeros(1 << 22, device=device), []  # 16 MiB
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank(group) >= 0:  # this rank is a member
            dist.all_reduce(x, group=group)
            x[0].item()  # GPU work is asynchronous: wait for it
        took.append(time.perf_counter() - start)
    return min(took)


report(two=best(dist.new_group([0, 1])), four=best(dist.group.WORLD))

# %%
for ranks, took in {2: timed["two"][0], 4: timed["four"][0]}.items():
    algorithm = 2**24 / took / 1e9
    bus = 2 * (ranks - 1) / ranks * algorithm
    print(f"{ranks} ranks, measured: algorithm bandwidth {algorithm:.2f} GB/s, bus bandwidth {bus:.2f} GB/s")

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The bus bandwidth, if each rank has its own link. CPU ranks share cores and memory, so here it may fall as well.
#
# </details>
#
# ## Ring, tree, NVLS
#
# NCCL chooses an algorithm by size. A **ring** sends the fewest bytes and takes 2 (n − 1) messages in a row. Double
# **trees** take about 2 log n between nodes. **Predict** where the two lines cross: with 8 GPUs, with 64?

# %%
pictures.links.bus(machine="h100x8", devices=8)

# %%
pictures.links.bus(machine="h100x8", devices=64)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# Within a node, the ring is at least as fast for every size. Over 8 nodes it takes 126 messages in a row, and trees win
# up to hundreds of MiB. A bucket of 25 MiB reaches less than half of the bandwidth there: large jobs use larger ones.
#
# </details>
#
# An all-reduce can also work in **two levels**, so that each byte between nodes is already a sum over a node:

# %%
pictures.nodes.two_level(nodes=2, per_node=4)

# %% [markdown]
# **Predict:** what does the busiest rank send to other nodes, compared with one ring around all eight ranks?

# %%
pictures.nodes.all_reduces(nodes=2, per_node=4)

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# A seventh. One ring leaves each node through a single NIC, which carries all of it. NCCL therefore makes one ring per
# NIC and gives each a part of the message: 1.75 / 4 per NIC. Two levels send 0.25, because the ring between the nodes
# has two members and not eight.
#
# </details>
#
# **NVLS** (NVLink SHARP, from H100 on): the NVSwitch adds. The switch reads the whole message of every GPU, hands each
# the sum of its n-th part, and multicasts the parts that the GPUs send back: (1 + 1/n) · M bytes in each direction,
# instead of 2 (n − 1) / n · M. So the bus bandwidth may exceed that of the link. It is not in this model.
#
# ## Which axis over which link
#
# [Lab 08](08_combine.py) ordered the axes by bytes over bandwidth. But communication that overlaps with computation
# costs nothing until it is longer. Take the same 7B model on two nodes of 8 A100, with `tp` and `pp` as simple as in
# our scripts, so that all of both is exposed; `dp` overlaps with backward. **Predict:** which order is the best one
# now?

# %%
axes = {"pp": 2, "dp": 2, "tp": 4}
parameters, layers, width, tokens = 7e9, 32, 4096, 8 * 4096
activation = 2 * tokens * width
sent = {"tp": 2 * 3 / 4 * activation * 4 * layers / 2, "dp": 2 * parameters / 8, "pp": activation}  # see lab 08
backward = 4 * parameters * tokens / (axes["pp"] * axes["tp"]) / (312e12 * 0.62)  # seconds: FLOPs / reached FLOP/s
orders = pictures.mesh.modelled(axes, sent, per_node=8, inside=240e9, between=25e9)
for names, times in sorted(orders.items(), key=lambda item: sum(seconds for seconds, _ in item[1].values())):
    serial = sum(seconds for seconds, _ in times.values())
    hidden = min(times["dp"][0], backward)
    print(f"{' × '.join(names):13} {1e3 * serial:6.0f} ms without overlap, {1e3 * (serial - hidden):6.0f} ms exposed")

# %% [markdown]
# <details class="answer"><summary>What changes with overlap?</summary>
#
# `tp` must be within a node either way. Without overlap, `pp` is outermost. With overlap it is `dp`, as in Llama 3: its
# bytes hide behind backward on the slow link too, and the exposed messages of `pp` get the fast one. With small
# batches, backward is short, and `dp` is exposed again.
#
# </details>
#
# ## Does it hold on real GPUs?
#
# "TP stays within the node" is a rule about links. Published runs can judge it: pairs that have the same model, GPUs,
# pipeline and micro-batch, once with TP 8 and once with TP 16, on nodes of 8 GPUs. **Predict** the speed of TP 16
# relative to TP 8.

# %%
on_trial("tp-node")

# %% [markdown]
# ## The crossover of DDP
#
# From which batch on does DDP stop being bound by communication? Backward computes 4·N·D FLOPs for N parameters and D
# tokens per GPU, and an all-reduce of bf16 gradients moves 4·N bytes over each link. N cancels: **D = FLOP/s /
# bandwidth**. **Predict** the number of tokens for A100 with 193 TFLOP/s (reached) and a bus bandwidth of 200 GB/s.

# %%
for batch in (64, 128, 256, 512, 1024):  # samples of 512 tokens on 64 GPUs
    found = advise("350M", devices=64, machine="a100x8", batch=batch, sequence=512).to_json()["fits"]
    one = next(layout for layout in found if layout["strategy"] == "DDP")
    times = {"compute": one["seconds"]["computation"], "link": one["communication_seconds"]["data"]}
    times["exposed"] = one["seconds"]["data"]
    words = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())
    print(f"{512 * batch // 64:5} tokens per GPU: {words}")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# About 970 tokens by the formula. In the model it is more, because the all-reduce of one layer, 25 MB, reaches little
# more than half of the bandwidth. Accumulation with `no_sync` multiplies D without more memory. What stays exposed is
# the last message, which nothing is left to hide.
#
# </details>
#
# ## Rendezvous: two nodes on this machine
#
# `torchrun` runs once per node, and the agents meet at one address. Both commands are the same except for the number of
# the node. When a rank is killed and `--max-restarts` allows it, they meet again:

# %%
pictures.launching.restart(nodes=2, per_node=2)

# %% [markdown]
# The next cell starts two "nodes" with two ranks each, here:

# %% tags=["long"]
port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]  # a free one
words = f"--workload mlp --nproc 4 --nodes 2 --steps 4 --device cpu --rdzv-endpoint 127.0.0.1:{port} --json --node-rank"
command = [sys.executable, "-m", "labkit", "run", "ddp", *words.split()]
quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
nodes = [subprocess.Popen([*command, number], **quiet) for number in "01"]
for number, node in enumerate(nodes):
    found = json.loads(node.communicate()[0])
    own = [rank["rank"] for rank in found["ranks"] if rank["step_seconds_median"]]
    print(f"node {number}: {found['state']}, ranks {own} of {found['world_size']}")

# %% [markdown]
# Which ranks run on which node follows from the rendezvous, not from the number; with `--node-rank` and
# `--master-addr` instead, node *k* gets consecutive ranks from *k* times its GPUs on. Each node has a run folder with
# the events of its ranks; `labkit gather` puts the two together. If a node waits forever, the address, a firewall or
# the network interface is wrong ([lab 11](11_choose.py)).
#
# ## A Slurm script, line by line
#
# `labkit submit` sends a job to Slurm, `labkit pack` writes the same files without submitting. This is what it
# generates:

# %%
with tempfile.TemporaryDirectory() as folder:
    packed = Path(folder) / "job.zip"
    words = "-m labkit pack fsdp2 --workload gpt --nproc 16 --nodes 2 --device cuda --steps 1000 --save-every 100"
    subprocess.run([sys.executable, *words.split(), "-o", str(packed)], check=True, stdout=subprocess.DEVNULL)
    print(zipfile.ZipFile(packed).read("job.sbatch").decode())

# %% [markdown]
# | lines | what they do |
# | --- | --- |
# | `--nodes`, `--ntasks-per-node=1` | one task per node, which is torchrun; it starts a rank per GPU |
# | `--gpus-per-node` | without it, a job may see no GPU, or all of them |
# | `--requeue`, `--signal`, `trap` | two minutes before the limit the job goes back to the queue, and resumes |
# | `scontrol show hostnames` | the names of the nodes, of which the first hosts the rendezvous |
# | `port=…` | jobs that share a node need different ports |
# | `srun --kill-on-bad-exit=1` | starts one torchrun per node, and ends all when one fails |
# | `--rdzv-id` | a restarted job does not meet agents of its earlier life |
# | `… &` and `wait` | a shell handles signals only while it waits |
#
# **Predict** what happens if you write `--ntasks-per-node=8` and keep torchrun.
#
# <details class="answer"><summary>Answer</summary>
#
# Each node starts eight agents with eight ranks each: 64 ranks per node that compete for eight GPUs. With one task per
# rank, start `python train.py` without torchrun, and set `RANK`, `LOCAL_RANK` and `WORLD_SIZE` from Slurm's variables.
#
# </details>
#
# ## When a rank does not come
#
# Every collective has a timeout: **10 minutes** with NCCL, whose watchdog thread then aborts the process (`Watchdog
# caught collective operation timeout`), and **30 minutes** with gloo, which raises an error. Here rank 1 never joins a
# collective whose group has a timeout of one second. **Predict** what rank 0 gets.

# %%
# %%torchrun 2
from datetime import timedelta

from torch.distributed.constants import default_pg_timeout

report(default_of_gloo=str(default_pg_timeout))
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
if rank == 0:
    start = time.perf_counter()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        report(seconds=time.perf_counter() - start, error=str(error).rpartition("] ")[2][:70])
else:
    time.sleep(2)

# %% [markdown]
# Which rank is to blame? Torch's **flight recorder** keeps the last collectives of each rank in memory, with their
# sizes and order. With NCCL it is on by default: `TORCH_FR_BUFFER_SIZE` is 2000 (older versions call it
# `TORCH_NCCL_TRACE_BUFFER_SIZE`, and the oldest leave it at 0). When the watchdog fires, it writes a file per rank, to
# `TORCH_FR_DUMP_TEMP_FILE`, and `torchfrtrace` compares the files; that was not run here. The lab reads the same
# recorder while a run hangs: the finding `hang` of [lab 12](12_troubleshooting.py) names the rank, the collective and
# the line, long before any timeout.
#
# ## Exercises
#
# The figures of the first three are drawn for you: run a cell with the three dots, and the verdict says what they are.
#
# **1.** The bus bandwidth of a collective, in GB/s.

# %% tags=["exercise"]
bus_bandwidth = ...
check("clusters.bus", bus_bandwidth)

# %% [markdown]
# **2.** How many tokens does each GPU need so that backward can hide the all-reduce of DDP? Your training is not that
# of the formula above: think of what backward computes, and of what is sent.

# %% tags=["exercise"]
tokens_per_gpu = ...
check("clusters.tokens", tokens_per_gpu)

# %% [markdown]
# **3.** The rank of a process on several nodes.

# %% tags=["exercise"]
its_rank = ...
check("clusters.rank", its_rank)

# %% [markdown]
# **4.** Which layout uses the links best? Pick one for this case, with what you know about bytes and links:

# %%
print(atlas(model="nanotron Llama 8B", gpus=256).question)

# %% [markdown]
# There is one sample per GPU and step. Gradients are accumulated in 32 bits, nothing is recomputed, `zero` is 0 or 1.
# Answer with a text such as `"dp=16,tp=4,pp=4,zero=1,micro_batch=2"`; it is right if it reached 85 % of the fastest.

# %% tags=["exercise"]
layout = ...
check("clusters.published", layout)

# %% [markdown]
# When you have answered, look at all layouts of this case. What do the fast ones have in common?

# %%
pictures.atlas(model="nanotron Llama 8B", gpus=256, by="tp")
