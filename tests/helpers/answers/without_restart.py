"""Answers to the exercises of lab 23: right, naive and wrong ones, and cheats."""

from answers.mutants import mutant

from labkit.course.build.solutions import without_restart as replicas


def diloco(*changes):
    """The solution, in which each (old, new) is replaced."""
    return mutant(replicas, "DiLoCo", *changes)


def recovery(*changes):
    """The solution, in which each (old, new) is replaced."""
    return mutant(replicas, "recover", *changes)


def lost(replicas, samples, interval, restart, heal):
    return replicas * samples * (interval / 2 + restart), samples * heal


def lost_whole_interval(replicas, samples, interval, restart, heal):
    return replicas * samples * (interval + restart), samples * heal


GRADIENT = "point.grad = point - parameter\n"
REDUCE = "            dist.all_reduce(point.grad)\n            point.grad /= dist.get_world_size()\n"
OUTER = "torch.optim.SGD(self.point, rate, momentum, nesterov=True)"
STEP = "        self.outer.step()\n"
ONLY = "        if self.steps % self.every:\n            return\n"
OWN_SETTINGS = (
    f"        self.outer = {OUTER}\n",
    f"        self.outer = {OUTER}\n        self.settings = rate, momentum\n",
)
MISTAKES_OF_DILOCO = {
    "sign": ([(GRADIENT, "point.grad = parameter - point\n")], "moved the wrong way"),
    "no momentum": ([(OUTER, "torch.optim.SGD(self.point, rate)")], "are without the outer momentum"),
    "heavy ball": ([("nesterov=True", "nesterov=False")], "have momentum, but not Nesterov's"),
    "sum": ([("            point.grad /= dist.get_world_size()\n", "")], "come from the sum of the pseudo-gradients"),
    "forgets": (
        [OWN_SETTINGS, (STEP, f"        self.outer = {OUTER.replace('rate, momentum', '*self.settings')}\n{STEP}")],
        "momentum that begins anew in each round",
    ),
    "averages": (
        [(STEP, "        for point in self.point:\n            point -= point.grad\n")],
        "are the mean of the replicas: the outer optimizer",
    ),
    "alone": ([(REDUCE, "")], "losses: in step"),
}
FIRST = "            if point is self.point[0]:\n                dist.all_reduce(point.grad)\n"
CHEATS_OF_DILOCO = {
    "meets in every step": ([(ONLY, "")], "bytes sent: in step 0, a step after which replicas do not meet"),
    "sends beside": (
        [(ONLY, f"        dist.all_reduce(self.point[0].clone())\n{ONLY}")],
        "bytes sent: in step 0, a step after which replicas do not meet",
    ),
    "sends in half": (
        [
            (
                "            dist.all_reduce(point.grad)\n",
                "            half = point.grad.bfloat16()\n            dist.all_reduce(half)\n"
                "            point.grad = half.float()\n",
            )
        ],
        "losses: in step",
    ),
    "one layer": ([("            dist.all_reduce(point.grad)\n", FIRST)], "losses: in step"),
    "through a store": (
        [
            (
                "            dist.all_reduce(point.grad)\n",
                "            store = dist.distributed_c10d._get_default_store()\n"
                "            for row in point.grad:\n"
                "                store.set(f'{self.steps} {len(row.shape)}', str(row.sum().item()) * 500)\n"
                "            dist.all_reduce(point.grad)\n",
            )
        ],
        "through a store such as TCPStore",
    ),
    "through a file": (
        [(REDUCE, "            open('/dev/shm/point', 'wb').close()\n" + REDUCE)],
        "opens /dev/shm/point",
    ),
}

OWN = "        if own is None:\n"
VOTE = "if manager.commit(ok):"
MISTAKES_OF_RECOVERY = {
    "divides by all": ([("group.size()", "3")], "are divided by the number of ranks at the start"),
    "sum": ([(" / group.size()", "")], "are the sum over the quorum, not the mean"),
    "divides in place": (
        [
            ("mean = gradient.clone()", "gradient /= group.size()\n                mean = gradient.clone()"),
            ("mean / group.size()", "mean"),
        ],
        "are divided twice",
    ),
    "parameters only": (
        [("    for tensor in tensors:", "    for tensor in tensors[:5]:")],
        "lacks the optimizer state",
    ),
    "without buffers": ([("(*model.parameters(), *model.buffers())", "model.parameters()")], "lacks the buffers"),
    "raises": ([("except RuntimeError", "except KeyError")], "raised RuntimeError"),
}
AGAIN = "        manager.commit(False)\n        group, _ = manager.quorum(step)\n"
CHEATS_OF_RECOVERY = {
    "computes again": ([(OWN, "        if True:\n")], "calls backward 2 times in step"),
    "without a vote": ([(VOTE, "if ok:")], "without a vote of the quorum"),
    "votes by itself": (
        [(VOTE, "manager.agreed = True\n        if ok:")],
        # if only one of two ranks notices the failure, it asks the quorum while the other one is in the next step
        ("the quorum has agreed to 0 updates, expected 8", "waits in all_reduce"),
    ),
    "asks more often": ([(OWN, AGAIN + OWN)], "lighthouse: it was asked in"),
    "drops the step": (
        [(VOTE, "if not manager.commit(ok):\n            return step + 1\n        if True:")],
        "the quorum has agreed to 7 updates, expected 8",
    ),
    "sends the state in each step": (
        [("        if min(steps) < max(steps):\n", "        if True:\n")],
        "bytes sent: in step 0,",
    ),
    "writes a checkpoint": (
        [(VOTE, f"torch.save(own, '/dev/null')\n        {VOTE}")],
        "writes a file",
    ),
    "own gradients": ([("parameter.grad = mean / group.size()", "parameter.grad = gradient")], "rank's own samples"),
}

RIGHT = {"samples": lost, "diloco": replicas.DiLoCo, "recovery": replicas.recover}
WRONG = {
    "samples": (lost_whole_interval, "a failure comes in the middle of an interval on average"),
    "diloco": (diloco(*MISTAKES_OF_DILOCO["sign"][0]), "moved the wrong way"),
    "recovery": (recovery(*MISTAKES_OF_RECOVERY["divides by all"][0]), "are divided by the number of ranks"),
}
