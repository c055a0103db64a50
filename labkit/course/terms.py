"""The table of the glossary: terms of distributed training, each with one definition.

A definition stands alone: it says what the symbols of its formula are. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Term:
    """A term with its definition, as plain text.

    `also` are other names of the same thing. `ordinary` are words that find the term, but that are not explained in
    running text because they have other meanings there. `related` are names of other terms.
    """

    name: str
    definition: str
    related: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name with its synonyms in parentheses."""
        return f"{self.name} ({', '.join(self.also)})" if self.also else self.name

    def to_json(self) -> dict[str, Any]:
        """The term as plain values."""
        lists = {"also": list(self.also), "related": list(self.related)}
        return {"term": self.name, "definition": self.definition, **lists}


TERMS = (
    # ---- processes
    Term(
        "rank",
        "The number of a process within a process group, from 0 to its size − 1; often also the process itself. A "
        "job usually has one process per device.",
        ("local rank", "world size", "process group"),
    ),
    Term(
        "local rank",
        "The number of a process among the processes of its node, from 0 up; it usually selects the GPU. torchrun "
        "sets it as LOCAL_RANK.",
        ("rank", "node", "torchrun"),
    ),
    Term(
        "world size",
        "The number of processes of a job over all nodes: nodes × processes per node. torchrun sets it as WORLD_SIZE.",
        ("rank", "node", "process group"),
    ),
    Term(
        "node",
        "One machine of a job, with its own operating system, CPUs and devices. Devices within a node are connected "
        "by NVLink or PCIe, nodes by a network such as InfiniBand or Ethernet.",
        ("local rank", "interconnect"),
    ),
    Term(
        "process group",
        "A set of ranks that communicate with each other through one backend. A collective involves exactly the "
        "ranks of its group.",
        ("rank", "collective", "backend", "device mesh"),
    ),
    Term(
        "backend",
        "The library that carries out the communication of a process group: NCCL for tensors on GPUs, gloo for "
        "tensors on CPUs.",
        ("NCCL", "gloo", "process group"),
    ),
    Term(
        "NCCL",
        "NVIDIA's library of collectives and send/receive between GPUs, over NVLink, PCIe and the network. Its "
        "operations are kernels on a CUDA stream, and a call returns before the data have arrived.",
        ("backend", "gloo", "NVLink"),
        also=("NVIDIA Collective Communications Library",),
    ),
    Term(
        "gloo",
        "PyTorch's backend for tensors on CPUs: collectives and send/receive over TCP, run by threads of the process.",
        ("backend", "NCCL"),
    ),
    Term(
        "torchrun",
        "PyTorch's launcher. It starts the processes of a node, sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT in their environment, and restarts them after a failure if --max-restarts allows it.",
        ("rank", "rendezvous", "restart"),
    ),
    Term(
        "rendezvous",
        "The phase of a launch in which the launchers of all nodes find each other through a shared store, agree on "
        "the participants and assign the ranks.",
        ("torchrun", "elastic training"),
    ),
    Term(
        "elastic training",
        "Training in which the number of nodes may change during a job. After a change the nodes repeat the "
        "rendezvous, all processes restart with a new world size, and the script resumes from its last checkpoint.",
        ("rendezvous", "restart", "checkpoint"),
        ordinary=("elastic",),
    ),
    Term(
        "restart",
        "The reaction of torchrun to a rank that failed: it terminates the other ranks and starts all of them "
        "again, at most --max-restarts times. The script must resume from a checkpoint, or training begins again at "
        "step 0.",
        ("torchrun", "checkpoint", "elastic training"),
    ),
    # ---- communication
    Term(
        "collective",
        "A communication operation of all ranks of a process group, such as all-reduce. Every rank of the group "
        "must call it, in the same order as the other collectives of the group; if one does not, the others block.",
        ("process group", "all-reduce", "collective mismatch"),
        also=("collective operation",),
    ),
    Term(
        "all-reduce",
        "Combines one tensor per rank element by element, usually to the sum or mean, and leaves the result on "
        "every rank. With the ring algorithm each of n ranks sends 2 (n − 1) / n × S bytes for a tensor of S bytes.",
        ("reduce-scatter", "all-gather", "ring algorithm", "gradient synchronisation"),
    ),
    Term(
        "all-gather",
        "Concatenates the chunks of all ranks and leaves the whole tensor on every rank. With the ring algorithm "
        "each of n ranks sends (n − 1) / n × S bytes for a result of S bytes.",
        ("reduce-scatter", "all-reduce", "FSDP"),
    ),
    Term(
        "reduce-scatter",
        "Combines one tensor per rank element by element and leaves a different chunk of the result on each rank. "
        "With the ring algorithm each of n ranks sends (n − 1) / n × S bytes for an input of S bytes. An all-gather "
        "after it completes an all-reduce.",
        ("all-gather", "all-reduce", "FSDP"),
    ),
    Term(
        "broadcast",
        "Copies a tensor from one rank to all other ranks of the process group. DDP broadcasts the parameters of "
        "rank 0 once, at the start.",
        ("collective", "tree algorithm"),
    ),
    Term(
        "all-to-all",
        "Each rank sends a different chunk of its tensor to every other rank and receives one chunk from each. Each "
        "of n ranks sends (n − 1) / n × S bytes of an input of S bytes.",
        ("collective", "expert parallel", "context parallel"),
    ),
    Term(
        "send/receive",
        "Point-to-point communication: one rank sends a tensor, and one other rank receives it. Pipeline stages "
        "pass activations and their gradients in this way.",
        ("pipeline stage", "collective"),
        also=("point-to-point communication",),
        ordinary=("send", "receive", "P2P"),
    ),
    Term(
        "ring algorithm",
        "An algorithm for collectives in which each rank sends to its successor and receives from its predecessor "
        "only. An all-reduce of S bytes on n ranks takes 2 (n − 1) steps of S / n bytes: it uses the full bandwidth "
        "of the links, but its latency grows in proportion to n.",
        ("tree algorithm", "all-reduce"),
        also=("ring all-reduce",),
        ordinary=("ring",),
    ),
    Term(
        "tree algorithm",
        "An algorithm for collectives that combines data along a tree of ranks and passes results back down. Its "
        "latency grows with the logarithm of the number of ranks, which makes it faster than a ring for small "
        "tensors and many ranks.",
        ("ring algorithm", "broadcast"),
        ordinary=("tree",),
    ),
    Term(
        "interconnect",
        "The links between devices: NVLink, NVSwitch or PCIe within a node, InfiniBand or Ethernet between nodes. "
        "It is characterised by latency (seconds per message) and bandwidth (bytes per second).",
        ("NVLink", "PCIe", "InfiniBand"),
        ordinary=("link",),
    ),
    Term(
        "NVLink",
        "NVIDIA's direct link between GPUs. Its bandwidth per GPU, both directions added, is 600 GB/s on the A100, "
        "900 GB/s on the H100 and 1.8 TB/s on the B200; NVSwitch chips connect all GPUs of a node by NVLink.",
        ("PCIe", "interconnect", "NCCL"),
        ordinary=("NVSwitch",),
    ),
    Term(
        "PCIe",
        "PCI Express, the bus between the CPU and its GPUs and network adapters. With 16 lanes it carries about 16 "
        "GB/s in each direction in generation 3, 32 GB/s in generation 4 and 64 GB/s in generation 5.",
        ("NVLink", "interconnect", "pinned memory"),
    ),
    Term(
        "InfiniBand",
        "A network for clusters whose adapters read and write the memory of other nodes directly (RDMA). An NDR "
        "port carries 400 Gbit/s, which is 50 GB/s, in each direction.",
        ("interconnect", "node"),
    ),
    Term(
        "bus bandwidth",
        "The bandwidth of the links that the duration of a collective implies, in bytes per second: S / seconds × 2 "
        "(n − 1) / n for an all-reduce of S bytes on n ranks. It can be compared with the rating of the link for "
        "any number of ranks.",
        ("all-reduce", "interconnect"),
        also=("busbw",),
    ),
    Term(
        "traffic",
        "The bytes that a rank sends, usually given per step.",
        ("collective", "overlapped communication"),
    ),
    Term(
        "overlapped communication",
        "Communication that runs while the same device computes and therefore does not lengthen the step. DDP "
        "overlaps the all-reduce of a bucket with the backward pass of earlier layers.",
        ("exposed communication", "bucket", "prefetch"),
        also=("hidden communication",),
    ),
    Term(
        "exposed communication",
        "Communication during which the device computes nothing: it lengthens the step by its duration. Exposed "
        "time = communication time − overlapped time.",
        ("overlapped communication", "straggler"),
    ),
    Term(
        "straggler",
        "A rank that reaches a collective later than the others. A synchronous step takes as long as its slowest "
        "rank, because the collective completes only when every rank has called it.",
        ("collective", "exposed communication"),
    ),
    Term(
        "deadlock",
        "A state in which ranks block forever because each waits for an operation that another rank will never call.",
        ("collective mismatch", "collective"),
        ordinary=("hang",),
    ),
    Term(
        "collective mismatch",
        "A programming error: ranks of one process group call different collectives, or the same collective with "
        "different shapes, data types or order. It results in a deadlock, an error or wrong values.",
        ("deadlock", "collective"),
    ),
    # ---- data parallelism
    Term(
        "data parallel",
        "Each replica of the model processes a different shard of the global batch, and the gradients are averaged "
        "before the update, which keeps the replicas equal.",
        ("DDP", "DP", "replica", "gradient synchronisation"),
        also=("data parallelism",),
    ),
    Term(
        "DP",
        "torch.nn.DataParallel: one process drives several GPUs with threads. In every step it copies the model "
        "from GPU 0 to the others, scatters the batch, and gathers the outputs on GPU 0; PyTorch recommends DDP "
        "instead. In papers DP stands for data parallelism.",
        ("DDP", "data parallel"),
        also=("DataParallel", "nn.DataParallel"),
    ),
    Term(
        "DDP",
        "torch.nn.parallel.DistributedDataParallel: one process per device with a full replica of the model. The "
        "gradients are averaged by all-reduce, bucket by bucket, during the backward pass.",
        ("data parallel", "bucket", "all-reduce", "DP"),
        also=("DistributedDataParallel",),
    ),
    Term(
        "replica",
        "A copy of the model that trains on its own shard of the data. It occupies one device or is split over "
        "several.",
        ("data parallel", "global batch"),
    ),
    Term(
        "gradient synchronisation",
        "Averaging the gradients that ranks computed from different samples, so that all replicas apply the same "
        "update: by all-reduce in DDP, by reduce-scatter in FSDP.",
        ("all-reduce", "reduce-scatter", "bucket"),
        also=("gradient sync", "gradient synchronization"),
    ),
    Term(
        "bucket",
        "A buffer in which DDP collects the gradients of several parameters for one all-reduce. By default the "
        "first bucket is 1 MiB and the others are 25 MiB: larger buckets cost fewer calls, smaller ones start "
        "earlier.",
        ("DDP", "overlapped communication"),
    ),
    Term(
        "gradient accumulation",
        "Adding up the gradients of several micro-batches before one optimizer step. The global batch grows at "
        "constant activation memory, and only the last micro-batch needs gradient synchronisation.",
        ("global batch", "micro-batch", "gradient synchronisation"),
    ),
    Term(
        "global batch",
        "The samples of one optimizer step over all ranks: samples per replica and micro-batch × replicas × "
        "micro-batches.",
        ("micro-batch", "gradient accumulation", "replica"),
        also=("global batch size",),
    ),
    Term(
        "micro-batch",
        "One of the equal parts of a batch that pass through the model one after another, with one optimizer step "
        "after the last: in a pipeline or for gradient accumulation.",
        ("global batch", "gradient accumulation", "pipeline parallel"),
    ),
    Term(
        "DistributedSampler",
        "PyTorch's sampler that assigns each rank a shard of the data set, of equal length for all because samples "
        "are repeated or dropped. set_epoch(epoch) must be called in every epoch; otherwise all epochs use the same "
        "order.",
        ("shard", "data parallel"),
    ),
    Term(
        "weak scaling",
        "More devices at a constant batch per device: the global batch grows. Efficiency = throughput on n devices "
        "/ (n × throughput on one).",
        ("strong scaling", "throughput", "global batch"),
    ),
    Term(
        "strong scaling",
        "More devices at a constant global batch: the batch per device shrinks. Speed-up = time on one device / "
        "time on n devices, ideally n; efficiency = speed-up / n.",
        ("weak scaling", "throughput", "global batch"),
    ),
    Term(
        "throughput",
        "Samples or tokens processed per second over all ranks, each sample counted once: global batch / seconds "
        "per step.",
        ("MFU", "weak scaling", "strong scaling"),
    ),
    Term(
        "MFU",
        "Model FLOPs utilisation: the floating-point operations per second that the model itself needs at the "
        "measured throughput, divided by the peak of the devices. For a transformer about 6 × parameters × tokens "
        "per second / peak; recomputation does not count.",
        ("throughput", "activation checkpointing"),
        also=("model FLOPs utilisation", "model FLOPs utilization"),
    ),
    # ---- sharding
    Term(
        "shard",
        "The part of a tensor, of the training state or of a data set that one rank holds when ranks divide it "
        "among themselves.",
        ("FSDP", "ZeRO", "DTensor", "DistributedSampler"),
    ),
    Term(
        "optimizer state",
        "The values that an optimizer stores per parameter. Adam has two moments: 8 bytes per parameter in fp32, 12 "
        "with the fp32 copy of the parameters in mixed precision.",
        ("ZeRO-1", "mixed precision", "checkpoint"),
    ),
    Term(
        "ZeRO",
        "Zero Redundancy Optimizer (Rajbhandari et al., 2020): data-parallel ranks shard the state that each of "
        "them would otherwise store in full. Its three stages shard the optimizer state, then also the gradients, "
        "then also the parameters.",
        ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP"),
        also=("Zero Redundancy Optimizer",),
    ),
    Term(
        "ZeRO-1",
        "Shards the optimizer state: each of n ranks updates 1 / n of the parameters and sends the result to the "
        "others. With Adam in mixed precision a rank stores 4 + 12 / n bytes per parameter instead of 16; with a "
        "reduce-scatter of the gradients the traffic is that of DDP.",
        ("ZeRO", "ZeRO-2", "optimizer state"),
        also=("ZeRO stage 1",),
    ),
    Term(
        "ZeRO-2",
        "Shards the optimizer state and the gradients. With Adam in mixed precision each of n ranks stores 2 + 14 / "
        "n bytes per parameter instead of 16; the traffic is that of DDP.",
        ("ZeRO", "ZeRO-1", "ZeRO-3"),
        also=("ZeRO stage 2",),
    ),
    Term(
        "ZeRO-3",
        "Shards the optimizer state, the gradients and the parameters: with Adam in mixed precision each of n ranks "
        "stores 16 / n bytes per parameter. Parameters are gathered for forward and again for backward, which makes "
        "the traffic 1.5 times that of DDP.",
        ("ZeRO", "ZeRO-2", "FSDP"),
        also=("ZeRO stage 3",),
    ),
    Term(
        "FSDP",
        "Fully Sharded Data Parallel, PyTorch's form of ZeRO-3. Each rank stores a shard of parameters, gradients "
        "and optimizer state; one unit at a time is gathered before its forward and backward, and its gradients are "
        "combined by reduce-scatter.",
        ("FSDP2", "FSDP unit", "ZeRO-3", "prefetch"),
        also=("FullyShardedDataParallel", "Fully Sharded Data Parallel", "FSDP1"),
    ),
    Term(
        "FSDP2",
        "The second interface of FSDP in PyTorch, torch.distributed.fsdp.fully_shard. It shards each parameter "
        "along its first dimension as a DTensor; FSDP1 flattens the parameters of a unit into one tensor.",
        ("FSDP", "DTensor", "FSDP unit"),
        also=("fully_shard",),
    ),
    Term(
        "FSDP unit",
        "A group of parameters that FSDP gathers and frees together, usually one transformer block. The largest "
        "unit in full adds to the peak memory, and each unit costs its own collectives.",
        ("FSDP", "prefetch", "reshard after forward"),
        ordinary=("unit", "wrapping unit"),
    ),
    Term(
        "reshard after forward",
        "Freeing the gathered parameters of an FSDP unit after its forward. It saves memory and costs a second "
        "all-gather in backward.",
        ("FSDP unit", "all-gather", "ZeRO-3"),
    ),
    Term(
        "prefetch",
        "Starting a transfer before its data are needed, in order to overlap it with computation: the all-gather of "
        "the next FSDP unit, or the loading of the next batch.",
        ("overlapped communication", "FSDP unit", "pinned memory"),
        also=("prefetching",),
    ),
    Term(
        "hybrid sharding",
        "FSDP within groups of ranks and replication between the groups, usually one group per node. Parameters are "
        "gathered over the fast links of the node only, and an all-reduce between nodes averages the sharded "
        "gradients.",
        ("FSDP", "device mesh", "node"),
        also=("HSDP", "HYBRID_SHARD"),
    ),
    Term(
        "DTensor",
        "torch.distributed.tensor.DTensor: a tensor with its global shape, a device mesh and, per mesh dimension, a "
        "placement: Shard(dim), Replicate or Partial.",
        ("device mesh", "shard", "partial sum"),
    ),
    Term(
        "device mesh",
        "An array of ranks with named dimensions, each for one form of parallelism, for instance 2 × 4 ranks for "
        "data × tensor. The ranks of each row along a dimension form a process group.",
        ("process group", "DTensor", "hybrid sharding"),
        also=("DeviceMesh", "mesh"),
    ),
    # ---- splitting the model
    Term(
        "tensor parallel",
        "Splits the weight matrices of a layer over ranks. Each rank computes with its shard, and collectives in "
        "every layer combine the results; it needs fast links and normally stays within a node.",
        ("column parallel", "row parallel", "sequence parallel", "NVLink"),
        also=("tensor parallelism", "TP"),
    ),
    Term(
        "column parallel",
        "Splits a linear layer along its output features: each rank computes a slice of the output from the full "
        "input. Forward needs no communication; backward needs an all-reduce of the gradient of the input.",
        ("row parallel", "tensor parallel"),
        also=("ColwiseParallel",),
    ),
    Term(
        "row parallel",
        "Splits a linear layer along its input features: each rank computes a partial sum of the full output from "
        "its slice of the input, and an all-reduce or reduce-scatter adds the partial sums.",
        ("column parallel", "partial sum", "tensor parallel"),
        also=("RowwiseParallel",),
    ),
    Term(
        "partial sum",
        "A tensor that must still be added to its counterparts on other ranks to give the result, such as the "
        "output of a row-parallel layer before its all-reduce.",
        ("row parallel", "DTensor"),
    ),
    Term(
        "sequence parallel",
        "Complements tensor parallelism: between the tensor-parallel layers (norms, dropout) the activations are "
        "sharded along the sequence dimension. A reduce-scatter and an all-gather replace each all-reduce, with the "
        "same traffic.",
        ("tensor parallel", "context parallel", "activation"),
        also=("sequence parallelism",),
    ),
    Term(
        "loss parallel",
        "Computes the cross-entropy of logits that stay sharded along the vocabulary. The ranks exchange a few "
        "numbers per position (its maximum, its sum of exponentials and the target's logit) instead of all logits.",
        ("tensor parallel", "column parallel"),
        also=("loss parallelism",),
    ),
    Term(
        "context parallel",
        "Splits long sequences: each rank holds a chunk of the positions for the whole model. Attention exchanges "
        "keys and values between the ranks, for instance around a ring.",
        ("sequence parallel", "all-to-all", "ring algorithm"),
        also=("context parallelism",),
        ordinary=("CP", "ring attention"),
    ),
    Term(
        "expert parallel",
        "Distributes the experts of a mixture-of-experts layer over ranks. One all-to-all sends each token to the "
        "ranks of its experts, and a second one returns the outputs.",
        ("all-to-all", "tensor parallel"),
        also=("expert parallelism",),
        ordinary=("EP", "mixture of experts", "MoE"),
    ),
    Term(
        "pipeline parallel",
        "Assigns consecutive layers of the model to different ranks as stages. Micro-batches pass through the "
        "stages one after another; only activations and their gradients at the stage boundaries are sent.",
        ("pipeline stage", "micro-batch", "bubble", "send/receive"),
        also=("pipeline parallelism", "PP"),
    ),
    Term(
        "pipeline stage",
        "The consecutive layers that one rank of a pipeline computes. (The stages of ZeRO are something else: what "
        "it shards.)",
        ("pipeline parallel", "interleaved 1F1B", "ZeRO"),
        ordinary=("stage",),
    ),
    Term(
        "bubble",
        "The time in which a pipeline stage idles because no micro-batch is ready for it. With p equal stages and m "
        "micro-batches it is (p − 1) / (m + p − 1) of the step under GPipe and 1F1B.",
        ("GPipe", "1F1B", "interleaved 1F1B", "zero bubble"),
        also=("pipeline bubble",),
    ),
    Term(
        "GPipe",
        "A pipeline schedule: all micro-batches run forward, then all run backward. A stage stores the activations "
        "of all micro-batches.",
        ("1F1B", "bubble", "micro-batch"),
    ),
    Term(
        "1F1B",
        "A pipeline schedule: after a warm-up each stage alternates one forward and one backward. The bubble is "
        "that of GPipe, but a stage stores the activations of at most p micro-batches, the number of stages.",
        ("GPipe", "interleaved 1F1B", "bubble"),
    ),
    Term(
        "interleaved 1F1B",
        "A pipeline schedule in which each rank holds v stages that are not adjacent. With p ranks and m "
        "micro-batches the bubble is only (p − 1) / (v m + p − 1) of the step, and about v times as many "
        "activations are sent.",
        ("1F1B", "bubble", "pipeline stage"),
        also=("interleaved schedule",),
        ordinary=("interleaved",),
    ),
    Term(
        "zero bubble",
        "Pipeline schedules that split backward into the gradients of the inputs, which the previous stage waits "
        "for, and the gradients of the weights, which nothing waits for until the update and which fill the bubble "
        "(Qi et al., 2023).",
        ("bubble", "1F1B", "interleaved 1F1B"),
        also=("zero-bubble schedule",),
    ),
    # ---- memory and precision
    Term(
        "activation",
        "An intermediate result of forward that is stored until backward has used it. The memory for activations "
        "grows in proportion to the size of the micro-batch, the sequence length and the number of layers.",
        ("activation checkpointing", "peak memory", "1F1B"),
    ),
    Term(
        "activation checkpointing",
        "Stores only some activations in forward and recomputes the others in backward. With every block recomputed "
        "it costs about one more forward, a third more computation.",
        ("activation", "peak memory"),
        also=("gradient checkpointing", "activation recomputation"),
    ),
    Term(
        "peak memory",
        "The largest number of bytes that were allocated at one time, usually over a step. It decides whether a "
        "model fits.",
        ("activation", "optimizer state", "FSDP unit"),
    ),
    Term(
        "mixed precision",
        "Forward and backward compute in 16 bits (bf16 or fp16), and the update is made in fp32. With Adam: 2 bytes "
        "per parameter for parameters, 2 for gradients and 12 for the optimizer state, 16 in total.",
        ("loss scaling", "optimizer state"),
    ),
    Term(
        "loss scaling",
        "Multiplies the loss by a factor before backward, to prevent small gradients from underflowing in fp16, and "
        "divides the gradients by it before the update. If a gradient overflows, the step is skipped and the factor "
        "is lowered. bf16 does not need it.",
        ("mixed precision",),
        also=("gradient scaling",),
    ),
    Term(
        "pinned memory",
        "Page-locked memory of the host, which a GPU can read directly. Copies from it can run asynchronously "
        "(non_blocking=True) and overlap with computation.",
        ("prefetch", "PCIe"),
        also=("page-locked memory",),
    ),
    # ---- checkpoints
    Term(
        "checkpoint",
        "The state that a run needs to resume, stored in files: parameters, optimizer state, step, and state of "
        "random generators and data order. Activation checkpointing is something else.",
        ("sharded checkpoint", "full checkpoint", "restart"),
    ),
    Term(
        "full checkpoint",
        "A checkpoint with the whole state in one file, written by one rank. Sharded state must first be gathered, "
        "and the memory of that rank limits the size of the model.",
        ("checkpoint", "sharded checkpoint"),
        ordinary=("whole checkpoint",),
    ),
    Term(
        "sharded checkpoint",
        "A checkpoint in which every rank writes its own shards, in parallel. torch.distributed.checkpoint can load "
        "it with a different number of ranks.",
        ("checkpoint", "full checkpoint", "shard"),
        also=("distributed checkpoint",),
    ),
)
