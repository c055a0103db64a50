"""What a process inherits from its parent or reads while importing; a run starts warm only if the server has the same
values.

Facts are a dict of JSON values; the keys are the phrases in which a difference is reported. The server records its own
facts when it starts; the facts of a run come from the process that starts it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.setup.environment import CLONE

# Environment variables that the interpreter, torch or one of its libraries reads during start-up.
_READ_EARLY = (
    *(
        "ATEN_",
        "BLIS_",
        "C10_",
        "DNNL_",
        "GLIBC_",
        "GOMP_",
        "GOTO_",
        "KINETO_",
        "KMP_",
        "LANG",
        "LC_",
        "LD_",
        "MALLOC_",
        "MKL_",
    ),
    *(
        "NPY_",
        "NUMEXPR_",
        "NUMPY_",
        "OMP_",
        "ONEDNN_",
        "OPENBLAS_",
        "PYTHON",
        "PYTORCH_",
        "TORCH_",
        "TORCHDYNAMO_",
        "TORCHINDUCTOR_",
    ),
    *("TRITON_", "VECLIB_", "XLA_"),
)
# Read when code is compiled, and set by torch itself in a process that has compiled.
_READ_LATE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Set by scikit-learn in a process that has imported it, for an OpenMP runtime that is loaded later.
_SET_BY_IMPORTS = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
_ADDED_BY_RANKS = {"KINETO_LOG_LEVEL": "99"}  # see probe/__main__.py
_STATUS = ("Umask", "Groups", "Cpus_allowed_list", "Mems_allowed_list", "NoNewPrivs", "Seccomp", "CapEff")
_RESET = (
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGTERM",
    "SIGCHLD",
    "SIGPIPE",
    "SIGXFSZ",
)  # by supervisor and agent, or by every Python
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """The facts of a process that this process would start now with this environment."""
    early = _ADDED_BY_RANKS | {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name not in _READ_LATE and _SET_BY_IMPORTS.get(name) != value
    }
    variables = {f"the environment variable {name}": value for name, value in sorted(early.items())}
    return {"the version of labkit": _labkit(), "the installed packages": _packages()} | variables | _inherited()


def difference(server: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The first fact in which server and run differ, as a phrase; empty if there is none."""
    return next((name for name in sorted({*server, *run}) if server.get(name) != run.get(name)), "")


def shadowing(folders: set[str]) -> str:
    """A file or package in these folders that a new process would import instead of a module loaded here; empty if
    there is none.
    """
    loaded = {name: module for name, module in list(sys.modules.items()) if "." not in name and name != "__main__"}
    for folder in sorted(folders):
        try:
            names = os.listdir(folder)  # noqa: PTH208 - names alone
        except OSError:
            continue
        for name in names:
            path = Path(folder, name)
            module = loaded.get(name.partition(".")[0])
            if module is None or not _is_module(path) or module.__name__ in sys.builtin_module_names:
                continue
            origin = getattr(module, "__file__", None)
            if origin is None or not _same(path / "__init__.py" if path.is_dir() else path, Path(origin)):
                return str(path)
    return ""


def _is_module(path: Path) -> bool:
    return path.suffix in (".py", ".so") or (not path.suffix and (path / "__init__.py").is_file())


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _labkit() -> str:
    """A hash that changes with every change of labkit's code."""
    state = hashlib.sha256()
    for folder, folders, files in os.walk(CLONE / "labkit"):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                found = Path(folder, name).stat()
                state.update(f"{folder}/{name} {found.st_mtime_ns} {found.st_size}\n".encode(errors="surrogateescape"))
    return state.hexdigest()


def _packages() -> list[Any]:
    """A value that changes when a package is installed, upgraded or removed, in particular torch."""
    torch = importlib.util.find_spec("torch")
    places = [*site.getsitepackages(), site.getusersitepackages(), *([torch.origin] if torch and torch.origin else [])]
    return [sys.version, *([place, _changed(place)] for place in places)]


def _changed(place: str) -> int:
    try:
        return Path(place).stat().st_mtime_ns
    except OSError:
        return 0


def _inherited() -> dict[str, Any]:
    """What a child inherits from its parent besides the environment."""
    import resource  # not on Windows

    limits = {name: resource.getrlimit(kind) for name, kind in vars(resource).items() if name.startswith("RLIMIT_")}
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if ":\t" in line
    )
    spaces = [str(Path("/proc/self/ns", name).readlink()) for name in _NAMESPACES]
    cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    return {
        "the signals that are ignored": (
            int(status["SigIgn"], 16) & ~sum(1 << signal.Signals[name] - 1 for name in _RESET)
        ),
        "the user": [os.getuid(), os.geteuid(), os.getgid(), os.getegid()],
        "the limits of the process": {name: list(limit) for name, limit in limits.items()},
        "the priority of the process": os.getpriority(os.PRIO_PROCESS, 0),
        "the scheduling of the process": os.sched_getscheduler(0),
        "the rights of the process": [status.get(name, "").strip() for name in _STATUS],
        "the container of the process": [*spaces, cgroup],
    }
