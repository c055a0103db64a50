"""Terms of memory, precision and checkpoints."""

from labkit.course.terms.term import Term

TERMS = (
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
        "arithmetic intensity",
        "The floating-point operations of an operation per byte that it moves between memory and processor. Below the "
        "device's ratio of peak to bandwidth, the bandwidth limits the operation, above it the peak.",
        ("roofline", "MFU"),
    ),
    Term(
        "roofline",
        "The FLOP/s that a device can reach at most, by arithmetic intensity: the bandwidth of its memory times the "
        "intensity, up to its peak.",
        ("arithmetic intensity", "MFU"),
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
