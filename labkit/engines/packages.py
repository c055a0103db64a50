"""What a script imports: modules next to it, and packages, pinned to the installed versions. Nothing is executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path

from labkit.plan.spec import SpecError

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
    found = {Path(one.__file__) for one in finder.modules.values() if one.__file__}
    return sorted(path for path in found if path.suffix == ".py" and path.is_relative_to(root))


def requirements(files: Mapping[str, str], torch: str = "") -> tuple[str, ...]:
    """`package==version` for each package that Python files import, as installed here; `torch` is the version that ran,
    if it is known. Local versions such as `+cpu` are left out, because no registry has them."""
    own = {path.partition("/")[0].removesuffix(".py") for path in files}
    wanted = {"torch"} | {name for text in files.values() for name in _imports(text)}
    distributions = metadata.packages_distributions()
    names = {one for name in wanted - own - {_LAB} for one in distributions.get(name, ())[:1]}
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
