"""Answers to the exercises of lab 22: right, naive and wrong ones, and cheats."""

from answers.mutants import mutant

from labkit.course.build.solutions import precision as precision


def fsdp2(parameters, ranks, param, reduce, reshard):
    return 12 * parameters / ranks, (ranks - 1) / ranks * parameters * (param * (1 + reshard) + reduce)


def stores_param_dtype(parameters, ranks, param, reduce, reshard):
    return (param + 8) * parameters / ranks, fsdp2(parameters, ranks, param, reduce, reshard)[1]


def stepped(*changes):
    """The solution of the step with each (old, new) replaced."""
    return mutant(precision, "MixedPrecision", *changes)


def passed(*changes):
    """The solution of forward with each (old, new) replaced."""
    return mutant(precision, "forward", *changes)


CHOICE = "block(x) if index in best else checkpoint(block, x, use_reentrant=False)"
LOOP = "    always = len(blocks)"
DECIDES_ALONE = (
    ("        dist.all_reduce(flat)", "        finite = flat.isfinite().all()\n        dist.all_reduce(flat)"),
    ("not flat.isfinite().all()", "not finite"),
)


def peak_at_the_end(trace):
    """Not the peak: what is in use when the trace ends."""
    held = {}
    for event in trace:
        if event["action"] == "alloc":
            held[event["addr"]] = event
        elif event["action"] == "free_completed":
            held.pop(event["addr"])
    lines = {}
    for event in held.values():
        lines[precision.line_of(event)] = lines.get(precision.line_of(event), 0) + event["size"]
    return sum(lines.values()), lines


def traced(*changes):
    """The solution of the snapshot with each (old, new) replaced."""
    return mutant(precision, "at_the_peak", *changes)


SNAPSHOTS = {  # wrong ones: changes of the solution, and the words of the verdict
    "segments": (
        [('event["action"] == "alloc"', 'event["action"] in ("alloc", "segment_alloc")')],
        "a segment is what",
    ),
    "freed twice": (
        [
            (
                'elif event["action"] == "free_completed" and event["addr"] in held:\n'
                '            used -= held.pop(event["addr"])["size"]',
                'elif event["action"].startswith("free"):\n            used -= event["size"]',
            )
        ],
        "a block is freed once",
    ),
    "never freed": ([("used -= held.pop", "held.pop")], "freed memory counts no more"),
    "the outer frame": ([("own[0] if own", "own[-1] if own")], "the first frame is the innermost"),
    "the frames of torch": (
        [('if frame["filename"].endswith("train.py")', "")],
        "blocks are named by the line of the first frame in train.py",
    ),
}

RIGHT = {
    "snapshot": precision.at_the_peak,
    "bytes": fsdp2,
    "step": lambda: precision.MixedPrecision,
    "recompute": lambda: precision.forward,
}
WRONG = {
    "snapshot": (peak_at_the_end, "that is what is in use at the end; the peak was before"),
    "bytes": (stores_param_dtype, "param_dtype is that of the gathered copy"),
    "step": (lambda: stepped(*DECIDES_ALONE), "decide by the gradients"),
    "recompute": (lambda: passed((CHOICE, "checkpoint(block, x, use_reentrant=False)")), "another choice of blocks"),
}

SENDS_FP32 = ("        dist.all_reduce(flat)", "        flat = flat.float()\n        dist.all_reduce(flat)")
STEPS = {  # wrong steps, honest and not: changes of the solution, and the words of the verdict
    "never skips": ([("not flat.isfinite().all()", "False")], "the update was made all the same"),
    "never halves": ([("            self.scale /= 2\n", "")], "after an overflow the scale must be halved"),
    "no scale": (
        [("self.model, self.scale = model, scale", "self.model, self.scale = model, 1.0")],
        "without the scale",
    ),
    "unscales in fp16": (
        [("flat.float() / (self.scale * dist.get_world_size())", "(flat / (self.scale * 2)).float()")],
        "convert them to fp32 first",
    ),
    "a sum": ([("(self.scale * dist.get_world_size())", "self.scale")], "divide by the number of ranks"),
    "no masters": (
        [
            ("[nn.Parameter(parameter.detach()) for parameter in model.parameters()]", "list(model.parameters())"),
            ("master.grad = part.view_as(master)", "master.grad = part.view_as(master).half()"),
        ],
        "fp16 rounds small updates away",
    ),
    "sends fp32": ([SENDS_FP32], "reduce them in fp16, as they are"),
    "sends nothing": (
        [("        dist.all_reduce(flat)", "        flat *= 2")],
        r"losses: in step \d|results: rank \d has a parameter",
    ),
    "keeps the gradients": (
        [("        flat = flat.float()", "        self.kept = flat\n        flat = flat.float()")],
        "memory: between two steps",
    ),
    "computes in fp32": (
        [
            (
                "        self.optimizer = make",
                "        layers = [layer for layer in model if isinstance(layer, nn.Linear)]\n"
                "        for layer in layers:\n"
                "            layer.forward = lambda x, layer=layer: nn.functional.linear(\n"
                "                x.float(), layer.weight.float(), layer.bias.float()).half()\n"
                "        self.optimizer = make",
            )
        ],
        "computation: the matrix products of rank",
    ),
    "overflow becomes a number": (
        [("        if not flat", "        flat = flat.nan_to_num(0, 0, 0)\n        if not flat")],
        r"losses: in step \d|results: rank \d has a parameter",  # a loss moves if there are steps enough after it
    ),
    "a finished implementation": (
        [("model.half()  #", "nn.parallel.DistributedDataParallel(model.half())  #")],
        "no finished API",
    ),
    "stays in fp32": ([("        model.half()  # new", "        # new")], "raised"),
}
OTHER_STEPS = {  # right ones
    "one call per parameter": [
        (
            "        dist.all_reduce(flat)",
            "        for part in flat.split([gradient.numel() for gradient in gradients]):\n"
            "            dist.all_reduce(part)",
        )
    ],
    "divides before it sends": [
        ("        dist.all_reduce(flat)", "        flat /= dist.get_world_size()\n        dist.all_reduce(flat)"),
        ("(self.scale * dist.get_world_size())", "self.scale"),
    ],
}
HOOKS = """
    def pack(tensor):
        {}

    def unpack(packed):
        {}

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for block in blocks:
            x = block(x)
    return x
"""
FORWARDS = {
    "stores everything": ([(CHOICE, "block(x)")], "memory: after forward of case 0"),
    "stores in order": (
        [
            (
                "    best, least = set(), None\n",
                "    best, least, used = set(), 0, always\n    for index, cost in enumerate(costs):\n"
                "        if used + cost[0] <= limit:\n            used += cost[0]\n            best.add(index)\n",
            ),
        ],
        "another choice of blocks",
    ),
    "stores the most expensive per byte": (
        [
            (
                "    best, least = set(), None\n",
                "    best, least, used = set(), 0, always\n"
                "    for index, cost in sorted(enumerate(costs), key=lambda one: -one[1][1] / one[1][0]):\n"
                "        if used + cost[0] <= limit:\n            used += cost[0]\n            best.add(index)\n",
            ),
        ],
        "another choice of blocks",
    ),
    "stores bf16": (
        [
            (
                "    always = len(blocks)",
                HOOKS.format(
                    "return tensor.bfloat16() if tensor.dim() == 2 and len(tensor) == len(given) else tensor",
                    "return packed.float()",
                ).replace("\n    def pack", "\n    given = x\n\n    def pack", 1)
                + "\n    always = len(blocks)",
            )
        ],
        "results: ",
    ),
    "stores byte strings": (
        [
            (
                "    always = len(blocks)",
                HOOKS.format(
                    "return pickle.dumps(tensor) if len(tensor) == 1024 else tensor",
                    "return pickle.loads(packed) if isinstance(packed, bytes) else packed",
                )
                + "\n    always = len(blocks)",
            ),
            ("import torch\n", "import pickle\n\nimport torch\n"),
        ],
        "memory: after forward of case 0, the process has grown",
    ),
    "writes files": (
        [
            (
                "    always = len(blocks)",
                HOOKS.format(
                    "path = f'/dev/shm/answer-{id(tensor)}'\n        torch.save(tensor, path)\n        return path",
                    "return torch.load(packed)",
                )
                + "\n    always = len(blocks)",
            )
        ],
        "rules: the answer on rank 0",
    ),
    "no gradients": ([(CHOICE, "block(x.detach())")], "results: "),
    "multiplies element by element": (
        [
            (CHOICE, "block(x) if index in best else checkpoint(*how(index, best, block), x, use_reentrant=False)"),
            (
                "def stored_and",
                "def product(x, layer):\n"
                "    parts = [(x[:, None] * rows).sum(-1) for rows in layer.weight.split(16)]\n"
                "    return torch.cat(parts, -1) + layer.bias\n\n\n"
                "def how(index, best, block):\n"
                "    first = min(set(range(7)) - best)\n"
                "    return (elementwise, block) if index == first else (block,)\n\n\n"
                "def elementwise(block, x):\n"
                "    for layer in block:\n"
                "        x = product(x, layer) if isinstance(layer, nn.Linear) else layer(x)\n"
                "    return x\n\n\ndef stored_and",
            ),
        ],
        "computation: case 0|results: .*gradient of case",  # another rounding may change the sign of a ReLU's input
    ),
}
