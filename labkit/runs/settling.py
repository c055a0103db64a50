"""The arguments of `run`: checked, and settled into a Spec that this machine can run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from labkit.common.arguments import shown
from labkit.common.units import counted, size
from labkit.plan.nodes import Node
from labkit.plan.script import write_script
from labkit.plan.settling import default_precision
from labkit.plan.spec import Spec, SpecError, bounds_of, check_fields
from labkit.record.folder import RunFolder
from labkit.setup.machine import Machine

_LARGEST = 16 << 20  # bytes of a script


def settle(what: str | os.PathLike[str] | Spec, *, look: bool = True, nodes: int = 1, **fields: Any) -> Spec:
    """The Spec that `run` would start with the same arguments, resolved for this machine, or for several `nodes` like
    it; `SpecError` if it cannot run. Without `look`, it takes milliseconds: data and checkpoints are not looked for."""
    spec = named(what, **fields)
    _check_script(spec)
    machine = Machine.here().times(nodes)
    return spec.on(machine) if look else spec.settled(machine)


def named(what: str | os.PathLike[str] | Spec, **fields: Any) -> Spec:
    """The Spec of the arguments of `run`, not yet resolved for a machine."""
    check_fields(fields)
    return located(replace(what, **fields) if isinstance(what, Spec) else Spec(**_named(what, fields), **fields))


def with_ranks(spec: Spec) -> Spec:
    """A Spec that may be for another machine: only a missing number of ranks, device or precision and the checkpoint to
    resume from are taken from this one."""
    machine = Machine.here()
    device = spec.device if spec.device != "auto" else "cuda" if machine.gpus else "cpu"
    spec = replace(spec, nproc=spec.nproc or machine.default_nproc(device) or 2, device=device)
    if spec.script is not None:
        _check_script(spec)
        return spec
    precision = spec.precision or default_precision(spec, machine.gpus[: spec.nproc])
    return located(replace(spec, precision=precision)).with_checkpoint()


def _named(what: Any, fields: Mapping[str, Any]) -> dict[str, str]:
    """`what` as a field of Spec: a script or a strategy."""
    if not isinstance(what, (str, os.PathLike)):
        raise SpecError("strategy", f"what must be a strategy, the path of a script or a Spec, got {shown(what)}")
    field = "script" if fields.get("as_module") or str(what).endswith(".py") else "strategy"
    duplicates = {"strategy", "script"} & fields.keys()
    if duplicates:
        name = min(duplicates)
        raise SpecError(name, f"{shown(what)} and {name}={shown(fields[name])} exclude each other; give one of them")
    return {field: os.fspath(what)}


def _check_script(spec: Spec) -> None:
    """`SpecError` if a Spec names a script or module that does not exist."""
    if spec.as_module:
        _check_module(spec.script)
    elif spec.script is not None and not os.path.isfile(spec.script):  # noqa: PTH113 as above
        raise SpecError("script", f"{Path.cwd()} has no script {shown(spec.script)}; give the path of a Python file")
    elif spec.script is not None and os.path.getsize(spec.script) > _LARGEST:  # noqa: PTH202 as above
        raise SpecError(
            "script",
            f"{shown(spec.script)} is larger than {size(_LARGEST, 0)}, which no script is; give the path of a Python"
            " file",
        )


def _check_module(name: str) -> None:
    """`SpecError` if no module of this name is found, without importing anything."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        raise SpecError(
            "script", f"module must be a name such as package.module, got {shown(name)}; to run a file, omit -m"
        )
    found = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    paths = [Path(place, *rest) for place in (found and found.submodule_search_locations) or ()]
    if rest or paths:
        there = any(path.with_name(f"{path.name}.py").is_file() or (path / "__main__.py").is_file() for path in paths)
    else:
        there = found is not None
    if not there:
        raise SpecError(
            "script",
            f"no module {name} that can run as a script was found in {Path.cwd()} or on the path of {sys.executable}",
        )


def check_sizes(spec: Spec, node: Node) -> None:
    """`SpecError` unless an elastic run works with each number of nodes that it admits."""
    if not node.fewer:
        return
    if not spec.max_restarts:
        raise SpecError(
            "max_restarts",
            f"--nodes {node.words} needs --max-restarts of at least 1: when a node leaves, the ranks of the others end"
            " with an error, and torchrun starts them again",
        )
    each, whole = node.share(spec.processes), _constants(spec)
    for nodes in node.fewer:
        few = f"--nodes {node.words} admits {counted(nodes, 'node')} with {counted(nodes * each, 'rank')}"
        try:
            other = _constants(settle(replace(spec, nproc=nodes * each), look=False, nodes=nodes))
        except SpecError as error:
            raise SpecError("nodes", f"{few}, on which this cannot run: {error}") from None
        for name in whole:
            if other.get(name) != whole[name]:
                raise SpecError(
                    "nodes",
                    f"{few}, for which the script has {name} = {other.get(name)} instead of {whole[name]}; use --nodes"
                    f" {node.nodes}, or settings in which {name} does not depend on the number of ranks",
                )


def _constants(spec: Spec) -> dict[str, str]:
    """The constants of a generated script, by name, as source; empty for a user's script, which is the same for all."""
    if spec.script is not None:
        return {}
    tree = ast.parse(write_script(spec)).body
    return {ast.unparse(one.targets[0]): ast.unparse(one.value) for one in tree if isinstance(one, ast.Assign)}


def descriptor(stdin: int | None) -> int | None:
    if stdin is None:
        return None
    if isinstance(stdin, bool) or not isinstance(stdin, int):
        raise TypeError(f"stdin must be a file descriptor such as file.fileno(), got {shown(stdin)}")
    try:
        os.fstat(stdin)
    except (OSError, OverflowError):
        raise ValueError(f"stdin must be an open file descriptor, got {shown(stdin)}") from None
    return stdin


def place(nproc: int) -> dict[str, Any]:
    """`nproc` and `device` for this many ranks on this machine: GPUs if there are enough, otherwise CPU ranks.

    Raises `SpecError` if the number of ranks is out of bounds.
    """
    try:
        nproc = bounds_of("nproc").check("nproc", nproc)
    except ValueError as error:
        raise SpecError("nproc", str(error)) from None
    return {"nproc": nproc, "device": "cuda" if len(Machine.here().gpus) >= nproc else "cpu"}


def located(spec: Spec) -> Spec:
    """The same Spec, with `resume` converted to a path if it is the name of a run; `SpecError` if there is no such
    run."""
    if spec.resume is None or os.path.isdir(spec.resume):  # noqa: PTH112 pathlib raises for a name that is too long for a path
        return spec
    try:
        return replace(spec, resume=str(RunFolder.find(spec.resume).path))
    except LookupError as error:
        raise SpecError("resume", str(error)) from None
