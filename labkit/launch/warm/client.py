"""The launcher's side of a warm start: starts the server, checks whether a run can start warm, and starts it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from labkit.common.files import NotOurs, check_folder, create, is_same_file, runtime_folder
from labkit.common.processes import TAG
from labkit.launch import local
from labkit.probe.lifetime import PARENT
from labkit.setup.environment import CLONE

# ---- messages over a Unix socket


RESERVED = "LABKIT_RESERVED"  # placeholder variable whose memory holds the environment of forked processes, for `ps`
ROOM = 1 << 15  # its size in bytes, and that of the placeholder argument for the command line
_MESSAGE = 1 << 16  # maximum bytes of a message; longer data, such as an environment, is passed as an open file
_MOST_FILES = 8
BUSY = 75  # EX_TEMPFAIL: exit code of a server that found another one
REFUSAL = "the warm server refused to serve"  # how the last line of a server's log begins that did not start
_PEER = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


def server_address() -> Path:
    """The socket of this user's server for this interpreter and this copy of labkit. Its folder may not exist yet."""
    key = "\0".join((sys.executable, sys.prefix, str(CLONE))).encode(errors="surrogateescape")
    return runtime_folder() / f"{hashlib.sha256(key).hexdigest()[:16]}.socket"


def server_log() -> Path:
    """What the server that was started last wrote."""
    return server_address().with_suffix(".log")


def lock() -> int:
    """Takes the lock of this user's server until the descriptor is closed. Raises `OSError`, which is `BlockingIOError`
    if another process has it."""
    import fcntl  # not on Windows

    file = os.open(server_address().with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def is_locked() -> bool:
    """Whether there is a server: one that starts, serves or ends."""
    try:
        os.close(lock())
    except BlockingIOError:
        return True
    except OSError:
        pass  # no server was ever started
    return False


def endpoint() -> socket.socket:
    """A socket that preserves message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> int:
    """The pid of the peer process. Raises `NotOurs` if it belongs to another user."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise NotOurs(f"process {pid} belongs to another user")
    return pid


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Sends one message with open files. Raises `OSError` if the peer is gone."""
    socket.send_fds(connection, [json.dumps(message).encode()], files, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its files, which the caller must close. Raises `EOFError` at the end, `OSError` for an
    invalid message.
    """
    data, files, flags, _ = socket.recv_fds(connection, _MESSAGE, _MOST_FILES)
    if not data and not files:
        raise EOFError
    try:
        message = json.loads(data)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not isinstance(message, dict):
            raise ValueError
        return message, files
    except ValueError:
        for file in files:
            os.close(file)
        raise OSError("invalid message") from None


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection and everything that it sent was received."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def as_file(value: Any) -> int:
    """An in-memory file that contains a value as JSON."""
    file = os.memfd_create("labkit", os.MFD_CLOEXEC)
    with open(os.dup(file), "w", encoding="ascii") as text:
        json.dump(value, text)
    return file


def from_file(file: int) -> Any:
    """Reads the value that `as_file` wrote and closes the file."""
    with open(file, encoding="ascii") as text:
        text.seek(0)
        return json.load(text)


# ---- what a run and its server must have in common


# Environment variables that the interpreter, torch or one of its libraries reads during start-up.
_READ_EARLY = (
    "ATEN_", "BLIS_", "C10_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "KINETO_", "KMP_", "LANG", "LC_", "LD_",
    "MALLOC_", "MKL_", "NPY_", "NUMEXPR_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "VECLIB_", "XLA_",
)  # fmt: skip
# Read when code is compiled, and set by torch itself in a process that has compiled.
_READ_LATE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Set by scikit-learn in a process that has imported it, for an OpenMP runtime that is loaded later.
_SET_BY_IMPORTS = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
_ADDED_BY_RANKS = {"KINETO_LOG_LEVEL": "99"}  # see probe/__main__.py
_STATUS = ("Umask", "Groups", "Cpus_allowed_list", "Mems_allowed_list", "NoNewPrivs", "Seccomp", "CapEff")
# by supervisor and agent, or by every Python
_RESET = ("SIGINT", "SIGHUP", "SIGQUIT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGXFSZ")
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
            if origin is None or not is_same_file(path / "__init__.py" if path.is_dir() else path, Path(origin)):
                return str(path)
    return ""


def _is_module(path: Path) -> bool:
    return path.suffix in (".py", ".so") or (not path.suffix and (path / "__init__.py").is_file())


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


# ---- the launcher's side of a warm start


FORCE_COLD = "LABKIT_COLD"  # environment variable; if set, every run starts cold
IDLE = 900.0  # seconds without a run after which a server exits
ANSWER = 0.3  # timeout of a server's answer, in seconds
_START = 20.0  # seconds to fork a supervisor on a very busy machine
_READY = 60.0  # seconds until a server that another process starts must be ready
_LOOK = 0.2  # seconds between two looks at it
_AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


@dataclass(frozen=True)
class Cold:
    """A run starts cold. `reason` is empty if a cold start was requested or there is no server yet."""

    reason: str = ""


class Started:
    """A process forked by the server, with the part of `subprocess.Popen` that its users need. Only the server knows
    its exit code; `returncode` is 0 when it has ended."""

    def __init__(self, pid: int, handle: int):
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle

    def poll(self) -> int | None:
        """0 if it has ended, None while it runs."""
        return self._ended(0)

    def wait(self) -> None:
        self._ended(None)

    def _ended(self, milliseconds: int | None) -> int | None:
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        if ended.poll(milliseconds):
            self.returncode = 0
        return self.returncode

    def __del__(self) -> None:
        os.close(self._handle)


class Tracing(Started):
    """A forked process that traces, with its standard input and output."""

    def __init__(self, pid: int, handle: int, requests: int, results: int):
        super().__init__(pid, handle)
        self.stdin, self.stdout = open(requests, "wb"), open(results, "rb")  # noqa: SIM115 as long as the process

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Consent:
    """A server's agreement to start one run soon."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def decline(self) -> None:
        """Leaves the agreement unused."""
        self._connection.close()

    def start(
        self, run_dir: Path, asked: float, environment: Mapping[str, str], files: Sequence[int]
    ) -> Started | Cold:
        """Requests the fork of the supervisor. `files` are its standard input, its log, the pipe of its watchdog, and
        the run's standard input, if any.
        """
        how = {"run_dir": str(run_dir), "started": repr(asked), "environment": dict(environment)}
        forked = self._fork("start", how, files)
        return forked if isinstance(forked, Cold) else Started(*forked)

    def trace(self, environment: Mapping[str, str], errors: int) -> Tracing | Cold:
        """Requests the fork of a process that traces; `errors` is its standard error."""
        (stdin, requests), (results, stdout) = os.pipe(), os.pipe()
        forked = self._fork("trace", {"environment": dict(environment)}, (stdin, stdout, errors))
        os.close(stdin)
        os.close(stdout)
        if isinstance(forked, Cold):
            os.close(requests)
            os.close(results)
            return forked
        return Tracing(*forked, requests, results)

    def _fork(self, what: str, arguments: Mapping[str, Any], files: Sequence[int]) -> tuple[int, int] | Cold:
        """The pid of a forked process, and a handle of it."""
        how = as_file(arguments)
        with self._connection:
            try:
                self._connection.settimeout(_START)
                send(self._connection, {"ask": what}, [how, *files])
                answer, handles = receive(self._connection)
            except (EOFError, OSError) as error:
                return Cold(f"the warm server did not start the run: {_in_words(error)}")
            finally:
                os.close(how)
        return answer["pid"], handles[0]


def consent(environment: Mapping[str, str], folders: Sequence[str]) -> Consent | Cold:
    """Asks the server for a warm start with this environment. `folders` are searched for modules: working folder and
    script folder.
    """
    if environment.get(FORCE_COLD):
        return Cold()
    connection = _connect()
    if isinstance(connection, Cold):
        return connection
    answer = _ask(connection, {"ask": "consent", "facts": facts(environment), "folders": list(folders)})
    if isinstance(answer, Cold) or answer["cold"]:
        connection.close()
        return answer if isinstance(answer, Cold) else Cold(answer["cold"])
    return Consent(connection)


def tracing(environment: Mapping[str, str], errors: int) -> Tracing | None:
    """A process that traces, forked by the server; None if there is no server that can. `environment` is added to the
    standing one, and `errors` is the standard error."""
    standing = local.standing_environment()
    agreed = consent(standing, ())
    found = agreed if isinstance(agreed, Cold) else agreed.trace(standing | environment, errors)
    return None if isinstance(found, Cold) else found


def about() -> dict[str, Any] | Cold:
    """The server's `pid`, the number of `runs` that it has started, and the seconds that it has been `idle`; or why it
    is unavailable.
    """
    connection = _connect()
    if isinstance(connection, Cold):
        return connection
    with connection:
        return _ask(connection, {"ask": "about"})


def prepare(environment: Mapping[str, str] | None = None) -> None:
    """Starts a server for this process unless a suitable one runs; returns immediately, some seconds before the server
    is ready. `environment` is that of the runs to come (default: the present one).

    The server exits when this process and all others that requested it have ended.
    """
    args = (local.standing_environment() if environment is None else environment,)
    threading.Thread(target=_prepare, args=args, daemon=True, name="labkit warm server").start()


def _prepare(environment: Mapping[str, str]) -> None:
    """A server that is found may end before it answers, and one that another process starts is not ready for seconds:
    both are looked at again."""
    if not _AVAILABLE or environment.get(FORCE_COLD):
        return
    last = time.monotonic() + _READY
    while not _is_served(environment) and time.monotonic() < last:
        if not is_locked() and _start_server(environment) != BUSY:
            return
        time.sleep(_LOOK)


def _is_served(environment: Mapping[str, str]) -> bool:
    """Registers this process with the server. False if there is no server, or one that ends, so that another can be
    started."""
    connection = _connect()
    if isinstance(connection, Cold):
        return False
    with connection, suppress(EOFError, OSError):  # if it was killed in the meantime
        try:
            send(connection, {"ask": "want", "facts": facts(environment)})
            if not receive(connection)[0]["differs"]:
                return True
            send(connection, {"ask": "replace"})
            if not receive(connection)[0]["leaves"]:
                return True  # others need it
        except TimeoutError:
            return True  # it hangs, and does not give up its lock
        receive(connection)  # wait until it has exited
    return False


def _start_server(environment: Mapping[str, str]) -> int | None:
    """Starts a server and waits for it, so that it does not become a zombie. Returns its exit code; None if it cannot
    be started."""
    address = server_address()
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        create(address.parent)
        with open(os.open(server_log(), flags, 0o600), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "labkit.launch.warm.server", repr(IDLE), str(os.getpid()), "." * ROOM],
                cwd=address.parent,  # a folder where no file can shadow a module
                env={RESERVED: "." * ROOM}
                | {name: value for name, value in environment.items() if name not in (TAG, PARENT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError:  # also if the folder is removed meanwhile
        return None  # runs start cold and report why
    return process.wait()


def _connect() -> socket.socket | Cold:
    if not _AVAILABLE:
        return Cold()
    address = server_address()
    connection = endpoint()
    connection.settimeout(ANSWER)
    try:
        check_folder(address.parent)
        connection.connect(str(address))
        peer(connection)
        return connection
    except FileNotFoundError:
        problem = Cold(_refusal())
    except ConnectionRefusedError:
        problem = Cold("the warm server has ended")
    except OSError as error:
        problem = Cold(f"the warm server cannot be used: {_in_words(error)}")
    connection.close()
    return problem


def _refusal() -> str:
    """Why the server that was started last does not serve; empty if it did not refuse, or none was started."""
    try:
        *_, last = server_log().read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    except OSError:
        return ""
    return last if last.startswith(REFUSAL) else ""


def _ask(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any] | Cold:
    try:
        send(connection, message)
        return receive(connection)[0]
    except (EOFError, OSError) as error:
        return Cold(f"the warm server did not respond: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER:g} s"
    return getattr(error, "strerror", None) or str(error) or "the connection was closed"


# ---- whether a script could depend on the seed of `hash(str)`
#
# All ranks of a warm run share the seed: the server draws it when it starts, and an interpreter cannot change it.
# torchrun's ranks each have their own, so that sets of strings have a different order on each of them.


_LABKIT = CLONE / "labkit"
_VARIABLE = "PYTHONHASHSEED"
_BUILDERS = ("set", "frozenset")
_WITHOUT_ORDER = ("all", "any", "bool", "isinstance", "len", "max", "min", "sorted")  # what they return has none
_LOADERS = ("__import__", "eval", "exec")  # of code that is not searched
_METHODS = ("add", "clear", "discard", "isdisjoint", "issubset", "issuperset", "remove", "update")
_COMPARISONS = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
_VIEWS = ("keys", "items")  # of a dict: operators make sets of them
_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def dependence(scripts: Sequence[Path], folders: Sequence[str], environment: Mapping[str, str]) -> str:
    """The first place where a script, or a module of these folders that it imports, could depend on the seed, as a
    clause with file and line; empty if there is none, or if the environment gives all ranks the same seed.

    Places are expressions that make a set whose order could matter, mentions of `hash` and of the types of sets, and
    code from elsewhere: a folder that is added to `sys.path`, or `exec`. The order cannot matter where only members are
    looked for, or all are counted or sorted without a key. Sets of numbers have the same order everywhere. Files that
    cannot be read or parsed have no such place; installed packages are not searched.
    """
    if environment.get(_VARIABLE, "random") not in ("", "random"):
        return ""
    waiting, seen = list(scripts), set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.resolve().is_relative_to(_LABKIT):
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for line, what in _places(tree):
            return f"line {line} of {path.name} uses {what}, in which warm ranks agree and torchrun's may not"
        waiting += (file for name in _imports(tree) for file in module_files(name, [str(path.parent), *folders]))
    return ""


def _places(tree: ast.AST) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    unordered = {id(node) for parent in nodes for node in _used_without_order(parent)}
    functions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    named = [id(value) for scope in (tree, *functions) for value in _named_without_order(scope, unordered)]
    unordered.update(named)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    views = {name for node in nodes for name in _named_views(node)}
    for node in nodes:
        if _mentions(node, "hash") or (isinstance(node, ast.Attribute) and node.attr in ("hash", "__hash__")):
            yield node.lineno, "hash()"
        elif _is_set(node, views) and id(node) not in unordered:
            yield node.lineno, "the order of a set"
        elif _mentions(node, *_BUILDERS) and id(node) not in called | unordered:
            yield node.lineno, "sets that other code makes"
        elif _mentions(node, *_LOADERS) or (isinstance(node, ast.ImportFrom) and node.module == "builtins"):
            yield node.lineno, "code that is not searched for the order of sets"
        elif _adds_folder(node):
            yield node.lineno, "modules of another folder, which are not searched for the order of sets"


def _mentions(node: ast.AST, *names: str) -> bool:
    return _is_read(node) and node.id in names


def _adds_folder(node: ast.AST) -> TypeGuard[ast.expr]:
    """Whether an expression changes `sys.path`."""
    if isinstance(node, ast.Attribute) and node.attr in ("append", "extend", "insert"):
        return _is_sys_path(node.value)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return _is_sys_path(node.value)
    return _is_sys_path(node) and isinstance(node.ctx, ast.Store)


def _is_sys_path(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "path" and _mentions(node.value, "sys")


def _named_views(node: ast.AST) -> Iterator[str]:
    """The names to which an assignment gives a view of a dict."""
    if isinstance(node, ast.Assign) and _is_view(node.value):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _named_without_order(scope: ast.AST, unordered: Container[int]) -> Iterator[ast.expr]:
    """The values of names that nothing in a module or function reads for their order."""
    names = {node.id for node in ast.walk(scope) if _is_read(node) and id(node) not in unordered}
    for node in ast.walk(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Name) and target.id not in names for target in targets):
                yield node.value


def _is_read(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _used_without_order(parent: ast.AST) -> list[ast.expr]:
    """The operands whose order does not matter to an expression or a statement."""
    if isinstance(parent, ast.Compare) and all(isinstance(operator, _COMPARISONS) for operator in parent.ops):
        return [parent.left, *parent.comparators]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in _WITHOUT_ORDER:
        by_key = any(keyword.arg == "key" for keyword in parent.keywords)  # those with equal keys keep their order
        types = [*ast.walk(parent.args[-1])] if parent.func.id == "isinstance" and parent.args else []
        return [] if by_key else [*parent.args, *(node for node in types if isinstance(node, ast.expr))]
    if isinstance(parent, (ast.arg, ast.AnnAssign)) and parent.annotation is not None:
        return [node for node in ast.walk(parent.annotation) if isinstance(node, ast.expr)]
    if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and parent.returns is not None:
        return [node for node in ast.walk(parent.returns) if isinstance(node, ast.expr)]
    if isinstance(parent, ast.Attribute) and parent.attr in _METHODS:
        return [parent.value]
    if isinstance(parent, (ast.If, ast.While)):
        return [parent.test]
    return []


def _is_set(node: ast.AST, views: Container[str]) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Set):
        return not all(isinstance(item, ast.Constant) and isinstance(item.value, (int, float)) for item in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        operands = (node.left, node.right)
        return any(_is_view(operand) or (_is_read(operand) and operand.id in views) for operand in operands)
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, ast.SetComp) or (is_call and node.func.id in _BUILDERS)


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


def _imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names of modules that may be imported, without the dots of relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []
            yield from package
            yield from (".".join([*package, alias.name]) for alias in node.names)


def module_files(name: str, folders: Sequence[str]) -> Iterator[Path]:
    """The files that `python -m name` executes, and `import name` too, if the module is in one of these folders."""
    parts = name.split(".")
    for folder in folders:
        for length in range(1, len(parts) + 1):
            place = Path(folder, *parts[:length])
            files = place.with_name(f"{place.name}.py"), place / "__init__.py", place / "__main__.py"
            yield from (file for file in files if file.is_file())
