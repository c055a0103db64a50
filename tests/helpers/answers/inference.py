"""Answers to the exercises of lab 25: right, naive and wrong ones."""

import math

from answers.mutants import mutant

from labkit.course.build.solutions import inference as handover


def served(model, gpu, tp, context):
    weights = 2 * model["parameters"] / tp
    cache = 4 * model["layers"] * max(1, model["kv_heads"] / tp) * model["head_width"] * context
    ridge = gpu["flops"] / gpu["bandwidth"]
    spared = 1 - cache * ridge / weights
    batch = max(0, (gpu["memory"] - weights) // cache)
    return weights, cache, batch, ridge / spared if spared > 0 else math.inf


def without_the_cache(model, gpu, tp, context):
    return *served(model, gpu, tp, context)[:3], gpu["flops"] / gpu["bandwidth"]


def handed(*changes):
    """The solution of the hand-over with each (old, new) replaced."""
    return mutant(handover, "hand_over", *changes)


CAST = "shards[name].bfloat16()"
COLUMN = "                dist.send(shard, 2 + rank)"
EMPTY = "parts[name] = torch.empty({}, dtype=torch.bfloat16)"
OF_COLUMN, OF_ROW = EMPTY.format("rows // 2, columns"), EMPTY.format("rows, columns // 2")
FROM_TRAINER = "            dist.recv(parts[name], rank - 2)"
BLOCKS = (
    "            for trainer, block in enumerate(parts[name].chunk(2)):  # the first has one row more if rows is odd\n"
    "                dist.recv(block, trainer)"
)
LOOP = "    for name, (rows, columns, split)"
OTHER_SAMPLER = [("2 + rank", "3 - rank"), ("rank - 2", "3 - rank"), ("2 + sampler", "3 - sampler")]

RIGHT = {"memory": served, "weights": lambda: handover.hand_over}
WRONG = {
    "memory": (without_the_cache, "that is without the cache"),
    "weights": (lambda: handed(*OTHER_SAMPLER), "is the part of the other sampler"),
}

# The body of the loop in which samplers get whole matrices from both trainers, and keep their part.
WHOLE = """\
        if rank < 2:
            for sampler in (2, 3):
                dist.send(shards[name].bfloat16(), sampler)
        else:
            whole = torch.empty(rows, columns, dtype=torch.bfloat16)
            for trainer, block in enumerate(whole.chunk(2)):
                dist.recv(block, trainer)
            parts[name] = whole.chunk(2, dim=0 if split == "column" else 1)[rank - 2].clone()
    return parts


def before(matrices, shards):
    rank, parts = dist.get_rank(), {}
    for name, (rows, columns, split) in matrices.items():
"""
BODY = "        if rank < 2:\n            shard ="
GATHERS = """\
        block = torch.zeros(-(-rows // 2), columns, dtype=torch.bfloat16)
        if rank < 2:
            block[: len(shards[name])] = shards[name].bfloat16()
        blocks = [torch.empty_like(block) for _ in range(4)]
        dist.all_gather(blocks, block)
        whole = torch.cat([blocks[0], blocks[1][: rows // 2]])
        if rank >= 2:
            parts[name] = whole.chunk(2, dim=0 if split == "column" else 1)[rank - 2].clone()
    return parts


def before(matrices, shards):
    rank, parts = dist.get_rank(), {}
    for name, (rows, columns, split) in matrices.items():
"""
ALL_TO_ALL = """\
        dim = 0 if split == "column" else 1
        sizes = [len(held) for held in torch.empty(rows, 1).chunk(2)]
        got = torch.empty(0, dtype=torch.bfloat16)
        out, into = [0] * 4, [0] * 4
        if rank >= 2:
            into[:2] = [n * columns // 2 for n in sizes] if dim else [n * columns * (rank == 2 + t) for t, n in
                enumerate(sizes)]
            got = torch.empty(sum(into), dtype=torch.bfloat16)
            sent = got[:0]
        elif dim:
            sent = torch.cat([half.flatten() for half in shards[name].bfloat16().chunk(2, dim=1)])
            out[2:] = [len(sent) // 2] * 2
        else:
            sent = shards[name].bfloat16().flatten()
            out[2 + rank] = len(sent)
        dist.all_to_all_single(got, sent, into, out)
        if rank >= 2:
            parts[name] = got.view(-1, columns // 2 if dim else columns)
    return parts


def before(matrices, shards):
    rank, parts = dist.get_rank(), {}
    for name, (rows, columns, split) in matrices.items():
"""

HANDOVERS = {  # wrong hand-overs: changes of the solution, and the words of the verdict
    "the other order": (
        [
            (
                BLOCKS,
                "            blocks = [torch.empty(n, columns // 2, dtype=torch.bfloat16) for n in (rows - rows // 2,"
                " rows // 2)]\n"
                "            for trainer, block in enumerate(blocks):\n"
                "                dist.recv(block, trainer)\n"
                "            parts[name] = torch.cat(blocks[::-1])",
            )
        ],
        "are in the wrong order: those of the first trainer come first",
    ),
    "once only": (
        [
            (LOOP, "    if hasattr(dist, 'kept'):\n        return dist.kept\n" + LOOP),
            (
                "    return parts",
                "    dist.kept = {name: part.clone() for name, part in parts.items()}\n    return parts",
            ),
        ],
        "a hand-over sends what the trainers have now",
    ),
    "in fp32": (
        [
            (CAST, "shards[name]"),
            ("torch.bfloat16", "torch.float32"),
            ("    return parts", "    return {name: part.bfloat16() for name, part in parts.items()}"),
        ],
        "is it cast to bf16 before it is sent",
    ),
    "stays fp32": ([(CAST, "shards[name]"), ("torch.bfloat16", "torch.float32")], "gets float32, expected bfloat16"),
    "whole matrices": ([(BODY, WHOLE + BODY)], "does a sampler get only what it keeps"),
    "gathers": ([(BODY, GATHERS + BODY)], "nobody needs whole matrices"),
    "casts all first": (
        [(LOOP, "    shards = {name: shard.bfloat16() for name, shard in shards.items()}\n" + LOOP)],
        "memory: at the peak",
    ),
}
OTHER_HANDOVERS = {  # right ones
    "all-to-all": [(BODY, ALL_TO_ALL + BODY)],
    "both at once": [
        (
            "                for sampler, block in enumerate(shard.chunk(2, dim=1)):\n"
            "                    dist.send(block.contiguous(), 2 + sampler)",
            "                blocks = [block.contiguous() for block in shard.chunk(2, dim=1)]\n"
            "                for work in [dist.isend(block, 2 + sampler) for sampler, block in enumerate(blocks)]:\n"
            "                    work.wait()",
        )
    ],
}
