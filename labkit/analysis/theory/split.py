"""The expected traffic of a model that is split: its layers, its sequence, or its blocks into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.analysis.theory.pieces import Case, Flow, flow_of, scalars, scattered
from labkit.training.rows import Transformer


def layers(case: Case) -> Iterator[Flow]:
    """Tensor parallelism (Shoeybi et al. 2019, section 3): one all-reduce per direction after each pair of split
    matrices.
    """
    groups, wide, row = case.n // case.rows // case.pipes, 2 if case.half else 4, case.spec.workload_row
    if row.transformer:
        yield from _of_transformer(case, row.transformer(case.options), groups, wide)
        return
    sums = " + ".join(map(str, row.partial_sums))
    what = f"{wide}·B·({sums})" if len(row.partial_sums) > 1 else f"{wide}·B·{sums}"
    again = wide * case.batch * row.recomputed_sums if case.again else 0
    more = {"recomputing a layer's activations repeats the all-reduce of its partial sums": again}
    yield flow_of("all_reduce", wide * case.batch * sum(row.partial_sums), case.rows, what, groups, more)


def _of_transformer(case: Case, model: Transformer, groups: int, wide: int) -> Iterator[Flow]:
    layers, width, positions = model.layers, model.width, case.batch * model.positions
    vectors, what = wide * positions * width, f"{wide}·B·T·d"
    if case.options["sequence_parallel"]:
        yield from _sequence_split(case, model, groups, vectors, what)
    else:
        more = {
            "gradients of query, key and value inputs are all-reduced separately": 2 * layers * vectors,
            "recomputing the attention repeats the all-reduce of its partial sums": (
                layers * vectors if case.again else 0
            ),
            "autocast keeps the gradients of cast tensors in fp32": (4 * layers + 1) * vectors if case.cast else 0,
        }
        yield flow_of("all_reduce", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, more)
    if case.options.get("loss_parallel"):
        yield flow_of("all_reduce", 3 * 4 * positions, case.rows, "3·4·B·T", groups)
    else:
        yield flow_of("all_gather", wide * positions * model.vocabulary, case.rows, f"{wide}·B·T·V", groups)


def _sequence_split(case: Case, model: Transformer, groups: int, vectors: int, what: str) -> Iterator[Flow]:
    """Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): an all-reduce becomes a reduce-scatter and an
    all-gather."""
    layers, width = model.layers, model.width
    again, cast = layers if case.again else 0, vectors if case.cast else 0
    gathered = {
        "the inputs of MLPs and of the head are gathered again for their weight gradients": (layers + 1) * vectors,
        "recomputing a layer's activations repeats its all-gathers": 2 * again * vectors,
        "autocast casts only after the all-gather before attention, and not the gradients of the embedding": (
            (layers + 1 + again) * cast
        ),
    }
    yield flow_of("all_gather", (4 * layers + 2) * vectors, case.rows, f"{what}·(4L + 2)", groups, gathered)
    sent_back = {
        "recomputing a layer's activations repeats its reduce-scatter": again * vectors,
        "autocast keeps the gradients of cast tensors in fp32": (2 * layers + 1) * cast,
    }
    yield scattered(
        case, flow_of("reduce_scatter", (4 * layers + 1) * vectors, case.rows, f"{what}·(4L + 1)", groups, sent_back)
    )
    # FSDP2 reduces the gradients of norms itself; otherwise each operation that needs them does: three in AdamW, and
    # the clipping.
    norms = 4 * 2 * width * (2 * layers + 1)
    times = 1 if case.spec.strategy_row.wrapper == "FSDP" else 4 if case.options["clip_norm"] else 3
    yield scalars("gradients of norms, reduced by each operation that needs them", times * norms, case.rows, groups)


def norms_of_layers(case: Case) -> Iterator[Flow]:
    """The gradient norm of each tensor of the split layers."""
    if case.options["clip_norm"]:
        groups = case.n // case.rows // case.pipes
        yield scalars("the gradient norms of split layers", 4 * case.cut, case.rows, groups)


def stages(case: Case) -> Iterator[Flow]:
    """A pipeline (Huang et al. 2019): the output of a stage is sent to the next, if another rank holds it, and its
    gradient is sent back."""
    inner = [stage for stage in range(1, len(case.stages) - 1) if case.holder(stage) != case.holder(stage - 1)]
    behind = [case.outputs[case.stages[stage] - 1] for stage in inner]
    wide = 2 if case.half and not (case.cast and case.spec.workload_row.wide_outputs) else 4
    lanes = case.n // case.pipes
    numbers = sum(size / case.rows if split else size for size, split in behind)
    total = 2 * wide * case.batch * numbers * lanes
    yield Flow("send", total, f"2 · {wide}·B·A per pipeline, A elements per sample between stages")


def gradients_of_stages(case: Case) -> Iterator[Flow]:
    """DDP between pipelines: an all-reduce of the gradients of each stage."""
    used = {"DDP all-reduces the bitmap of used parameters": 4 * len(case.shapes)}
    yield flow_of("all_reduce", case.size, case.n // case.pipes, f"4{case.letter}", more=used)


def agreements(case: Case) -> Iterator[Flow]:
    """Scalars on which the pipeline stages agree."""
    if case.options["clip_norm"]:
        yield scalars("the norm of all gradients", 4, case.pipes, case.n // case.pipes)
    if case.spec.precision == "fp16":
        yield scalars("whether a gradient overflowed", 4, case.n)


def keys_and_values(case: Case) -> Iterator[Flow]:
    """Context parallelism. As Llama 3 was trained (2024, section 3.3.2): all-gather of keys and values, reduce-scatter
    of their gradients. Around a ring (Liu et al. 2023): every rank sends each of them n − 1 times, and so the
    gradients. Ulysses (Jacobs et al. 2023, section 3.2): an all-to-all of query, key, value and output, and of their
    gradients.
    """
    model, wide = case.spec.workload_row.transformer(case.options), 2 if case.half else 4
    both = 2 * wide * model.layers * case.batch * model.positions * model.width
    what = f"2·{wide}·L·B·T·d"
    if case.options["method"] == "ring":
        sent, why = (case.n - 1) * both, "recomputing a layer's activations sends its keys and values again"
        yield Flow("send", 2 * sent, f"2(n−1)/n · {what} per rank", ((sent if case.again else 0, why),))
        return
    if case.options["method"] == "ulysses":
        part, why = both / 2 / case.n, "recomputing a layer's activations repeats its exchanges"
        more = {why: 4 * part if case.again else 0}
        yield flow_of("all_to_all", 8 * part, case.n, f"8·{wide}·L·B·T·d/n", more=more)
        return
    again = {"recomputing a layer's activations repeats its all-gather": both if case.again else 0}
    yield flow_of("all_gather", both, case.n, what, more=again)
    yield scattered(case, flow_of("reduce_scatter", both, case.n, what))
