"""Runs the ranks of a submitted answer with limits: `python -m labkit.course.build.sandbox …`.

The judge starts this program in a process group of its own, in new namespaces if the system allows it, and kills the
group after a timeout. The program imports torch once and forks the ranks, each of which limits itself before it reads
the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_PORT = "29511"  # of the rendezvous, in a network of its own
_FILE = 1 << 30  # bytes of the largest file that a rank may write
_NAMESPACES = (  # what `unshare` is asked for, the most first
    ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("--user", "--map-root-user", "--net"),
    ("--net",),
)
_MOMENT = 0.3  # seconds in which the other ranks can report, after one has failed


@dataclass(frozen=True)
class Limits:
    """Of one exercise of one submission: `seconds` in total, `cpu_seconds` and `memory` (bytes of address space) of
    each rank."""

    seconds: float = 120.0
    cpu_seconds: int = 60
    memory: int = 32 << 30


@cache
def namespaces() -> tuple[str, ...]:
    """The flags of `unshare` that this system allows; none if there is no network of its own to be had."""
    for flags in _NAMESPACES:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(["unshare", *flags, "true"], capture_output=True, timeout=10).returncode == 0:
                return flags
    return ()


def isolation() -> str:
    """What `namespaces` means, in words."""
    if not namespaces():
        return "no network namespace is available here: answers can reach the network and processes of this user"
    if "--pid" not in namespaces():
        return "answers have a network of their own, without any other host"
    return "answers have a network and a process table of their own: no other host, no other process"


def run_sandboxed(text: str, nproc: int, folder: Path, limits: Limits) -> None:
    """Runs a script on `nproc` ranks with `folder` as its argument; all processes have ended when it returns."""
    script, home = folder / "train.py", folder / "home"
    script.write_text(text, encoding="utf-8")
    home.mkdir()
    unshare = ["unshare", *namespaces(), "--"] if namespaces() else []
    argv = [sys.executable, "-m", __spec__.name, str(script), str(nproc), str(folder), json.dumps(asdict(limits))]
    root = str(Path(__file__).parents[3])
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"PYTHONPATH": root, "HOME": str(home), "TMPDIR": str(home)}
    run_to_end([*unshare, *argv], folder, home, environment, limits.seconds)


def run_to_end(argv: Sequence[str], folder: Path, cwd: Path, environment: Mapping[str, str], seconds: float) -> None:
    """Runs a program in a process group of its own, which is killed at its end or after `seconds`. Its output is in
    `folder`."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- the program inside


def main(script: str, nproc: int, folder: str, limits: Limits) -> None:
    """Forks the ranks and waits for them."""
    _loopback()
    from labkit.course.build.ranks import entry  # imports torch, once for all ranks

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT if namespaces() else _free_port()}
    os.environ["WORLD_SIZE"] = str(nproc)
    pids = set()
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            _run_rank(script, rank, folder, limits, entry.FAILED)
        pids.add(pid)
    end = time.monotonic() + limits.seconds
    while pids and time.monotonic() < end:
        for pid in tuple(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.discard(pid)
                if status:
                    end = min(end, time.monotonic() + _MOMENT)
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _run_rank(script: str, rank: int, folder: str, limits: Limits, failed: int) -> None:
    """The process of a rank: limits itself, then runs the script. Does not return."""
    code = failed
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["RANK"] = str(rank)
        sys.argv = [script, folder]
        names = {"__name__": "__main__", "__file__": script}
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec", dont_inherit=True), names)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else failed
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _loopback() -> None:
    """Starts the loopback interface of a new network; elsewhere it runs already."""
    import fcntl
    import socket
    import struct

    up, get, set_ = 0x1 | 0x40, 0x8913, 0x8914  # IFF_UP | IFF_RUNNING, SIOCGIFFLAGS, SIOCSIFFLAGS
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, get, request))[1]
        if not flags & 0x1:
            fcntl.ioctl(any_socket, set_, struct.pack("16sh", b"lo", flags | up))


def _free_port() -> str:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Limits(**json.loads(sys.argv[4])))
