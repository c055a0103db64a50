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
# # Collectives: who sends what to whom
#
# **Four ranks have computed four gradients, and each needs the sum of all four. Who sends what to whom, how long does
# it take, and what changes with eight ranks?**
#
# A rank can only *send* to one other rank and *receive* from one other rank. All collectives are built from these two
# operations. In this lab you look at them as pictures, predict their cost, run them on real processes, and write one
# yourself. The cells of this lab compute for about 1 minute on two cores.

# %%
from labkit import check, pictures

# %load_ext labkit

# %% [markdown]
# ## A cell on four ranks
#
# `%%torchrun 4` runs the cell in four processes. The process group is already initialised, and the names `rank`,
# `world_size`, `device`, `torch`, `dist` (which is `torch.distributed`), `os` and `time` are defined. `report` returns
# values as a table. If this machine has four GPUs, each rank uses one and NCCL does the communication. Otherwise the
# ranks are CPU ranks and use gloo.
#
# **Predict:** every rank runs the same lines. What does each one print, and in which order?

# %%
# %%torchrun 4
x = torch.full((3,), float(rank), device=device)
print("I am rank", rank, "of", world_size, "and have", x.tolist())
report(process=os.getpid(), device=str(device))

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Each rank prints its own number, from a separate process: see the column *process*. The order is not defined. Ranks
# wait for each other only when they communicate.
#
# </details>
#
# *The script that every rank runs*, below the table, contains the few lines that the magic added around the cell.

# %% [markdown]
# ## Broadcast: one rank has the data, all ranks need it
#
# DDP begins with a broadcast: rank 0 sends its weights to all other ranks. In the simplest algorithm, rank 0 sends to
# one rank after another.
#
# In these pictures an arrow is a message, and the cell next to a rank shows its data **after** the round.

# %%
pictures.collectives.broadcast(4, by="one_by_one")

# %% [markdown]
# This takes three rounds for four ranks: n − 1 rounds, and rank 0 does all the sending. Alternatively, each rank
# forwards the message to the next:

# %%
pictures.collectives.broadcast(4, by="chain")

# %% [markdown]
# Now the work is distributed evenly, but it still takes n − 1 rounds.
#
# **Predict:** after one round *two* ranks have the message, and both can send. How many rounds are enough for 8 ranks?
# For 1024?

# %%
pictures.collectives.broadcast(8, by="tree")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# The number of ranks that have the message doubles in each round: 1, 2, 4, 8. So a tree takes log₂ n rounds, rounded
# up: 3 for 8 ranks, and 10 for 1024 ranks instead of 1023.
#
# </details>
#
# ### From send and receive
#
# A chain takes two `if` statements. `recv` blocks until the message arrives.

# %%
# %%torchrun 4
x = torch.full((3,), float(rank + 1), device=device)
if rank > 0:
    dist.recv(x, src=rank - 1)
if rank < world_size - 1:
    dist.send(x, dst=rank + 1)
report(by_chain=x)
y = torch.full((3,), float(rank + 1), device=device)
dist.broadcast(y, src=0)
report(by_broadcast=y)

# %% [markdown]
# **Try it:** turn the chain into a tree. In round k = 1, 2, 4… each rank below k sends to rank + k.
# What happens if a rank waits for a message that no rank sends? Try that too. **Stop** terminates the cell.

# %% [markdown]
# ## Reduce: a broadcast in reverse
#
# Reverse the arrows and add along the way (`+`): rank 0 ends up with the sum. The digits in a cell say which ranks'
# data it contains, and Σ is the sum over all ranks.

# %%
pictures.collectives.reduce(4, by="tree")

# %% [markdown]
# ## All-reduce: all ranks need the sum
#
# DDP does this with the gradients in every step. Here are three algorithms, from the obvious one to the efficient one.
#
# **First algorithm:** reduce to rank 0, then broadcast.

# %%
pictures.collectives.all_reduce(4, by="root")

# %% [markdown]
# **Second algorithm:** the same along a tree, up and then down. It takes fewer rounds, but each round still sends whole
# messages, and half of the ranks are idle.

# %%
pictures.collectives.all_reduce(4, by="tree")

# %% [markdown]
# **Third algorithm:** split the message into n chunks, A B C D, and send one chunk per round to the right neighbour.
# All ranks send in every round.
#
# **Predict** before you look: how many rounds does it take, and how much of its message does one rank send in total?

# %%
pictures.collectives.all_reduce(4, by="ring")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Two passes of n − 1 rounds around the ring: in the first, ranks accumulate partial sums; in the second, they pass on
# the complete sums. That is 2 (n − 1) rounds of 1/n of the message each: 6 rounds and 1.5 messages for four ranks, and
# less than 2 messages for any number of ranks.
#
# </details>

# %% [markdown]
# ## Three more collectives
#
# **All-gather**: each rank has one chunk, and all ranks need all chunks. FSDP does this before it computes a layer.

# %%
pictures.collectives.all_gather(4)

# %% [markdown]
# **Reduce-scatter**: each rank has a whole message, and rank r needs chunk r of the sum. FSDP does this with gradients.

# %%
pictures.collectives.reduce_scatter(4)

# %% [markdown]
# **All-to-all**: each rank sends a different chunk to every other rank. `2›0` is the chunk from rank 2 to rank 0. A
# mixture of experts sends tokens to their experts this way.

# %%
pictures.collectives.all_to_all(4)

# %% [markdown]
# ## On real processes
#
# **Predict** the table, row by row. Rank r starts with [r, r, r, r], and for the all-to-all with [10r, 10r+1, 10r+2,
# 10r+3].

# %%
# %%torchrun 4
x = torch.full((4,), float(rank), device=device)
total, gathered = x.clone(), [torch.empty_like(x) for _ in range(4)]
chunk, swapped = torch.empty(1, device=device), torch.empty(4, device=device)

dist.all_reduce(total)
dist.all_gather(gathered, x)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
reduce_scatter(chunk, x)
dist.all_to_all_single(swapped, 10.0 * rank + torch.arange(4.0, device=device))
report(all_reduce=total, all_gather=torch.cat(gathered), reduce_scatter=chunk, all_to_all=swapped)

# %% [markdown]
# The all-to-all transposes the table: row r of the input has become column r.

# %% [markdown]
# ## Optional: the ring, one round per cell
#
# Each cell so far started four processes that ended with it. With `--keep` the ranks stay, with their variables, and
# `%%ranks` runs the next cell on the same processes. So you can stop a collective between two rounds and look.

# %%
# %%torchrun 4 --keep
x = torch.full((4,), float(rank + 1), device=device)  # four chunks of one number each
finished = 0  # rounds

# %% [markdown]
# The next cell is one round of the first pass. The rank sends a chunk to its right neighbour, and adds the one from its
# left neighbour. **Predict:** which number changes on rank 0, and to what?

# %%
# %%ranks
sent = (rank - finished) % 4
incoming = torch.empty(1, device=device)
to_right = dist.P2POp(dist.isend, x[sent : sent + 1].clone(), (rank + 1) % 4)
from_left = dist.P2POp(dist.irecv, incoming, (rank - 1) % 4)
for request in dist.batch_isend_irecv([to_right, from_left]):
    request.wait()
x[(sent - 1) % 4] += incoming[0]
finished += 1
x

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# Rank 0 sends chunk 0 and receives chunk 3 of rank 3, which is 4: its last number becomes 1 + 4 = 5.
#
# </details>
#
# **Try it:** run the cell twice more. After three rounds each rank has one complete sum, 1 + 2 + 3 + 4 = 10: that is a
# reduce-scatter. `%ranks` shows what each rank holds. Run the cell a fourth time: why does the second pass of the ring
# copy chunks instead of adding them?
#
# The ranks hold their devices until they are stopped:

# %%
# %ranks stop

# %% [markdown]
# ## The cost model
#
# A message takes a fixed latency **α**, regardless of its size, and a time **β** per byte:
#
# > **T = rounds · α + bytes sent one after another · β**
#
# α dominates short messages, so few rounds are best. β dominates long messages, so few bytes are best. The picture
# counts both.

# %%
pictures.collectives.costs(8)

# %% [markdown]
# **Predict:** which of the all-reduce algorithms is best for a single number? Which for a gradient of 100 MB?
#
# <details class="answer"><summary>Answer</summary>
#
# The tree takes the fewest rounds, so it is best for a single number. The ring sends the fewest bytes, so it is best
# for 100 MB. Libraries choose the algorithm by message size.
#
# </details>
#
# Libraries know more algorithms than these. None of the following was run here:
#
# - **Chunked chain.** A broadcast of a long message M along a chain is slow only if each rank waits for the whole
#   message. Split into many chunks, the message flows through the chain, and all links are in use: about M · β in
#   total, against ⌈log₂ n⌉ · M · β for the tree.
# - **Double tree.** NCCL reduces each half of the message along a different tree (the picture below). An inner node of
#   one tree is a leaf of the other, so no rank sends more than two messages, however many ranks there are. NCCL also
#   cuts each half into chunks that flow through the tree: about as few rounds as a tree, about as many bytes as a ring.
# - **Two levels.** First within each node, then between nodes ([lab 19](19_clusters.py)).
# - **In the switch.** NVLink SHARP and InfiniBand SHARP add in the switch. InfiniBand's: each rank sends its message
#   once and receives the sum once, M bytes instead of 2 (n − 1) / n · M. NVLink's: (1 + 1/n) · M, because the sum of
#   each n-th part passes through the GPU that asked for it.

# %%
pictures.collectives.all_reduce(4, by="double_tree")

# %% [markdown]
# ## The cost on this machine
#
# The next cell times eight message sizes, from 1 KiB to 16 MiB. The slowest rank determines the time.


# %%
# %%torchrun 4 --as timed
def seconds(size, repeats=8):
    x = torch.zeros(size // 4, device=device)  # 4 bytes per number
    dist.all_reduce(x)  # warm-up: the first call of each size is slower
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(x)
    x[0].item()  # GPU work is asynchronous: wait for it
    return (time.perf_counter() - start) / repeats


sizes = [4**k * 1024 for k in range(8)]
seconds(sizes[0])  # synchronises the ranks
report(sizes=sizes, seconds=[seconds(size) for size in sizes])

# %% [markdown]
# Two of the eight points are enough to determine α and β. The ring takes 2 (n − 1) rounds and sends 2 (n − 1) / n of
# the message.

# %%
n, sizes = len(timed["sizes"]), timed["sizes"][0]
took = [max(ranks) for ranks in zip(*timed["seconds"])]
rounds, fraction = 2 * (n - 1), 2 * (n - 1) / n
alpha = took[0] / rounds
beta = (took[-1] - took[0]) / (fraction * (sizes[-1] - sizes[0]))
print(f"α = {1e6 * alpha:,.0f} µs per message    1/β = {1 / beta / 1e6:,.0f} MB/s")

algorithm = sizes[-1] / took[-1]  # bytes per second of the longest message
print(f"algorithm bandwidth {algorithm / 1e6:,.0f} MB/s    bus bandwidth {fraction * algorithm / 1e6:,.0f} MB/s")

# %% [markdown]
# Benchmarks such as nccl-tests report two bandwidths. The **algorithm bandwidth** is message size / time; it falls as n
# grows, because each rank sends more. The **bus bandwidth** multiplies it by 2 (n − 1) / n, the fraction of the message
# that a rank sends: it can be compared with the speed of the link, for any number of ranks.

# %% [markdown]
# **Predict:** according to the model, at which size does a message take twice as long as the shortest one? Will
# the other six points lie on the curve?

# %%
model = [rounds * alpha + fraction * beta * size for size in sizes]
pictures.collectives.times(sizes, {"all-reduce": took}, {"all-reduce": model})

# %% [markdown]
# <details class="answer"><summary>What to see</summary>
#
# The curve has a flat part, where α dominates, and a rising part, where β dominates. They meet near n α / β bytes:
# there, bandwidth costs as much time as latency.
#
# The curve passes through the first and the last point by construction. The other points are the test. If they are off
# the curve, the model is too simple:
#
# - **CPU ranks (gloo)** share cores. Most of α is the time until the operating system schedules the next rank, and it
#   varies a lot. Bytes are cheap up to the size of a cache and expensive beyond it. No network is involved: this is
#   memory being copied.
# - **GPUs (NCCL)** use different algorithms for short and long messages, so points may lie *below* the curve in the
#   middle.
#
# A DDP gradient bucket has 25 MiB by default. In which part of the curve is that, and why?
#
# </details>
#
# **Try it** with two ranks: write `%%torchrun 2 --as timed` and run the three cells again. What are α and β now?

# %% [markdown]
# ### More ranks
#
# **Predict:** with 8 ranks instead of 4, how does the time of the shortest message change? And of the longest?

# %% tags=["long"]
# %%torchrun 8 --as eight
for size in (1024, 1024, 2**24):  # the first size twice, to warm up
    x = torch.zeros(size // 4, device=device)
    dist.all_reduce(x)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        dist.all_reduce(x)
    x[0].item()
    report(**{f"bytes_{size}": (time.perf_counter() - start) / 4})

# %% tags=["long"]
for name, four, expected in (("bytes_1024", took[0], 14 / 6), ("bytes_16777216", took[-1], 1.75 / 1.5)):
    print(f"{name:15} 8 ranks / 4 ranks = {max(eight[name]) / four:4.1f}, expected {expected:.1f}")

# %% [markdown]
# <details class="answer"><summary>Answer</summary>
#
# According to the model, the shortest message takes 14 / 6 as long (more rounds), and the longest 1.75 / 1.5 as long
# (more bytes): for long messages, the cost of a ring hardly depends on the number of ranks. This holds if every rank
# has its own link and its own processor. CPU ranks share a few cores and take turns: twice as many ranks copy twice as
# much through the same memory, and a round ends only when the last rank has been scheduled. There, both times grow far
# more than the model says.
#
# </details>

# %% [markdown]
# ## Exercises
#
# **1.** Eight ranks all-reduce a gradient of 100 MB with a ring. How many MB does each rank send?

# %% tags=["exercise"]
megabytes = ...
check("collectives.bytes", megabytes)

# %% [markdown]
# **2.** Each of the two passes of the ring is a collective by itself. Which two collectives are they, in order? Write
# them as one string, separated by a comma.

# %% tags=["exercise"]
two = ...
check("collectives.halves", two)

# %% [markdown]
# **3.** Write the ring. `chunks` is a list of `n` numbers, one per chunk. `send(to, number)` blocks until rank `to`
# receives, as `dist.send` may do. `receive(source)` blocks until rank `source` sends. Return the list of the `n` sums.
# The check runs your function on three and on four threads and says where it is wrong. It also detects deadlocks.


# %% tags=["exercise"]
def ring(chunks, rank, n, send, receive): ...


check("collectives.ring", ring)

# %% [markdown]
# ## Summary
#
# | collective | rounds (ring or tree) | sent by a rank | used by |
# | --- | --- | --- | --- |
# | broadcast (tree) | ⌈log₂ n⌉ | up to ⌈log₂ n⌉ M | DDP, once at the start |
# | all-reduce | 2 (n − 1) | 2 (n − 1) / n · M | DDP and tensor parallelism, in every step |
# | all-gather | n − 1 | (n − 1) / n · M | FSDP, before each layer |
# | reduce-scatter | n − 1 | (n − 1) / n · M | FSDP and ZeRO, for gradients |
# | all-to-all | n − 1 | (n − 1) / n · M | mixtures of experts |
# | send, receive | 1 | M | pipelines, from stage to stage |
#
# A collective completes only when **every** rank in its group calls it. If one rank is late or takes a different
# branch, all others wait for it.
