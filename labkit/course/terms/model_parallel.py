"""Terms of what splits a model, a sequence or its layers."""

from labkit.course.terms.term import Term

TERMS = (
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
        ("bubble", "1F1B", "interleaved 1F1B", "V-shaped schedule"),
        also=("zero-bubble schedule",),
    ),
    Term(
        "V-shaped schedule",
        "A pipeline schedule whose stages go down the ranks and up again: of p ranks, rank r holds the stages r and "
        "2p − 1 − r. The two stages at the tip of the V are on one rank, and every rank stores about the same amount "
        "of activations. ZB-V (Qi et al., 2023) and DualPipeV (DeepSeek, 2025) are of this shape.",
        ("zero bubble", "interleaved 1F1B", "pipeline stage"),
        also=("ZB-V", "ZBVZeroBubble", "DualPipeV"),
    ),
)
