"""The commands of the lab that start a Spec: their arguments, and one command for each of several nodes."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

from labkit.plan.fields import about, default_of
from labkit.plan.nodes import Node
from labkit.plan.spec import Spec
from labkit.setup.machine import Machine


def arguments(spec: Spec) -> list[str]:
    """The arguments of `labkit run` for a Spec, without those that have their default."""
    words = [spec.strategy] if spec.script is None else [*(["-m"] if spec.as_module else []), spec.script]
    for one in fields(Spec):
        value = getattr(spec, one.name)
        if about(one).on_command_line and value != default_of(one):
            words += [f"--{one.name.replace('_', '-')}", *([] if about(one).switch else [str(value)])]
    rows = () if spec.script else (*spec.strategy_row.all_options, *spec.workload_row.options)
    known = {option.name: option.default for option in rows}
    for name, value in spec.options.items():
        if value != known.get(name):
            words += ["--option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return [*words, *(["--", *spec.args] if spec.args else [])]


def node_commands(spec: Spec, nodes: int, endpoint: str) -> list[str]:
    """The command for each of `nodes` machines like this one, in order: each has as many ranks as the Spec has here.

    `endpoint` is the address and port of node 0 as the others reach it. Raises `SpecError` if they cannot run it.
    """
    whole = replace(spec, nproc=(spec.nproc or 1) * nodes).settled(Machine.here().times(nodes))
    Node(nodes, 0, endpoint).share(whole.processes)
    words = arguments(whole)
    end = words.index("--") if "--" in words else len(words)
    start = ["python3", "-m", "labkit", "run", *words[:end], "--nodes", str(nodes)]
    return [
        shlex.join([*start, "--node-rank", str(rank), "--rdzv-endpoint", endpoint, *words[end:]])
        for rank in range(nodes)
    ]
