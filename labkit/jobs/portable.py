"""A job without this lab, as a plain value: its files, what torchrun starts, on how many nodes, with which packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path

from labkit.common.units import size
from labkit.plan.nodes import divided
from labkit.plan.script import write_script
from labkit.plan.spec import Spec, SpecError
from labkit.record.folder import RunFolder
from labkit.record.follow import torch_of

# ---- what a script imports


_LAB = "labkit"


def local_modules(root: Path, script: str = "", module: str = "") -> list[Path]:
    """The files below `root` that a script there, or a module, needs: itself and what it imports, directly or not."""
    finder = ModuleFinder(path=[str(root)])
    try:
        if script:
            finder.run_script(str(root / script))
        else:
            finder.import_hook(module)
            if (root.joinpath(*module.split("."), "__main__.py")).is_file():
                finder.import_hook(f"{module}.__main__")
    except SyntaxError as error:
        raise SpecError("script", f"{error.filename}:{error.lineno} is not valid Python: {error.msg}") from None
    except ImportError:
        raise SpecError("script", f"{root} has no module {module}; pack it from the folder that contains it") from None
    found = {Path(imported.__file__) for imported in finder.modules.values() if imported.__file__}
    return sorted(path for path in found if path.suffix == ".py" and path.is_relative_to(root))


def requirements(files: Mapping[str, str], torch: str = "") -> tuple[str, ...]:
    """`package==version` for each package that Python files import, as installed here; `torch` is the version that ran,
    if it is known. Local versions such as `+cpu` are left out, because no registry has them."""
    own = {path.partition("/")[0].removesuffix(".py") for path in files}
    wanted = {"torch"} | {name for text in files.values() for name in _imports(text)}
    distributions = metadata.packages_distributions()
    names = {distribution for name in wanted - own - {_LAB} for distribution in distributions.get(name, ())[:1]}
    pins = {name: metadata.version(name).partition("+")[0] for name in names - {_LAB}}
    if torch:
        pins["torch"] = torch
    return tuple(f"{name}=={version}" for name, version in sorted(pins.items()))


def _imports(text: str) -> set[str]:
    """The top-level names of the packages that a Python file imports, without those of the standard library."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


# ---- portable


SCRIPT = "train.py"  # the name of a generated script
REQUIREMENTS = "requirements.txt"
_LARGEST = 16 << 20  # bytes of all files of a job


@dataclass(frozen=True)
class Portable:
    """A job that needs nothing of this lab.

    `files` are the script and the modules that it imports, by relative path; `target` is what torchrun starts, with its
    arguments. `nodes` × `per_node` ranks run it; started again, it `resumes` from checkpoints or starts from step 1.
    `requirements` are pinned packages.
    """

    name: str
    files: Mapping[str, str]
    target: tuple[str, ...]
    nodes: int
    per_node: int
    device: str
    max_restarts: int
    resumes: bool
    requirements: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.per_node

    @property
    def all_files(self) -> dict[str, str]:
        """The files that the job needs wherever it runs: its own, and the list of packages."""
        return {**self.files, REQUIREMENTS: "".join(f"{requirement}\n" for requirement in self.requirements)}


def of_spec(spec: Spec, nodes: int = 1) -> Portable:
    """The job of a Spec with its number of ranks resolved. A strategy's job starts from the beginning, without the
    checkpoint that the Spec resumes from. Raises `SpecError`."""
    per_node = per_node_of(spec, nodes)
    if spec.script is None:
        files, target = {SCRIPT: write_script(replace(spec, resume=None))}, (SCRIPT,)
    elif spec.as_module:
        files = _read(Path.cwd(), local_modules(Path.cwd(), module=spec.script))
        target = ("-m", spec.script, *spec.args)
    else:
        script = Path(spec.script).absolute()
        files = _read(script.parent, local_modules(script.parent, script=script.name))
        target = (script.name, *spec.args)
    return _job(spec, nodes, per_node, files, target)


def of_run(folder: RunFolder, nodes: int = 1) -> Portable:
    """The job of a recorded run: the script that ran, with the version of torch that ran it. Raises `SpecError`."""
    spec = folder.read_spec().to_spec()
    version = torch_of(folder).partition("+")[0]
    if spec.resume is None and folder.script.is_file():
        script = {SCRIPT: folder.text(folder.script)}
        return _job(spec, nodes, per_node_of(spec, nodes), script, (SCRIPT, *spec.args), version)
    where = Path(folder.read_launch().cwd or ".")
    if spec.script is not None:
        if spec.as_module or not (where / spec.script).is_file():
            raise SpecError(
                "script", f"the script of {folder.name}, {spec.script}, is not in {where} any more; pack it by its path"
            )
        spec = replace(spec, script=str(where / spec.script))
    job = of_spec(spec, nodes)
    return replace(job, requirements=requirements(job.files, version))


def per_node_of(spec: Spec, nodes: int) -> int:
    """Ranks on each of `nodes` nodes; `SpecError` if the ranks cannot be divided among them."""
    if spec.nproc is None:
        raise SpecError("nproc", "the job depends on the number of ranks, which is not set; add --nproc")
    return divided(spec.processes, nodes)


def _job(
    spec: Spec, nodes: int, per_node: int, files: Mapping[str, str], target: tuple[str, ...], torch: str = ""
) -> Portable:
    return Portable(
        name=spec.name,
        files=files,
        target=target,
        nodes=nodes,
        per_node=per_node,
        device=spec.device if spec.device != "auto" else "cuda",
        max_restarts=spec.max_restarts,
        resumes=spec.save_every is not None,
        requirements=requirements(files, torch),
    )


def _read(root: Path, paths: list[Path]) -> dict[str, str]:
    """Python files below `root` as text, by relative path."""
    if sum(path.stat().st_size for path in paths) > _LARGEST:
        raise SpecError("script", f"the script and its modules are larger than {size(_LARGEST, 0)}; pack fewer modules")
    found = {}
    for path in paths:
        try:
            found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SpecError("script", f"{path} is not a text in UTF-8; save it as UTF-8") from None
    return found
