"""Terms of data parallelism, and of the sharding of its state."""

from labkit.course.terms.term import Term

TERMS = (
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
)
