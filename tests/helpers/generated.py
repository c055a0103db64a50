"""Specs whose scripts are generated, and the parts of a script."""

from __future__ import annotations

import ast

from labkit.plan.spec import Spec
from labkit.training.strategies import STRATEGIES

ONLY = {"cp": "gpt", "ep": "moe"}  # what strategies can train that cannot train images
FIRST = dict.fromkeys(STRATEGIES, "cnn") | ONLY


def spec(strategy: str, **asked) -> Spec:
    """A Spec with the given fields; the workload defaults to the first that the strategy can train."""
    ranks = STRATEGIES[strategy].default_nproc or 2
    return Spec(strategy, **{"nproc": ranks, "workload": FIRST.get(strategy, "cnn")} | asked)


def constants(source: str) -> dict[str, object]:
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def functions(source: str) -> dict[str, str]:
    return {
        node.name: ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
