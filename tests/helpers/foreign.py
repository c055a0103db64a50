"""Untrusted run folders: copies of recorded runs to be corrupted, and everything that front ends show about a
folder."""

from __future__ import annotations

import io
import os
import shutil
import socket
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from places import RECORDED

from labkit.cli import parser as cli
from labkit.cli.commands import act
from labkit.frontends.handout.page import RunError, run_page
from labkit.record.documents import Unreadable
from labkit.record.folder import STREAMS, RunFolder

FINISHED, THREADS, HANG, KILLED = sorted(path.name for path in RECORDED.iterdir())


def copy_of(root: Path, recorded: str = FINISHED, name: str = "") -> RunFolder:
    """A copy of a recorded run under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / (name or recorded)
    shutil.copytree(RECORDED / recorded, path)
    return RunFolder(path)


def command(*arguments: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it wrote to stdout and stderr."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogatepass", write_through=True)
    with redirect_stdout(said), redirect_stderr(said):
        try:
            code = act(cli.parse(arguments))
        except SystemExit as end:
            code = end.code
    return code, said.buffer.getvalue().decode("utf-8", "replace")


def everything(folder: RunFolder) -> str:
    """Everything that commands, handout and logs show about a run, by path."""
    path = str(folder.path)
    said = [
        command("show", path)[1],
        command("show", path, "--json")[1],
        command("runs")[1],
        command("runs", "--json")[1],
    ]
    said += [
        command("replay", path, "--speed", "1e12")[1],
        command("compare", path)[1],
        *(command("export", path, "--to", tool, "--out", f"{path}.exports")[1] for tool in ("csv", "perfetto")),
    ]
    said += [written.read_text() for written in sorted(Path(f"{path}.exports").rglob("*")) if written.is_file()]
    try:
        said.append(run_page(folder).body)
    except (RunError, Unreadable) as error:
        said.append(str(error))
    logs = [folder.log_of(rank, stream) for rank in range(2) for stream in STREAMS]
    said += [folder.end_of(path, 64 << 20) for path in logs if path]
    said += [str(folder.search_log(rank, stream, "S", 10)) for rank in range(2) for stream in STREAMS]
    return "\n".join(said)


def bind(held: socket.socket, path: Path) -> None:
    """Binds a Unix socket at a path of any length: by its name, because the path of a socket must be short."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        held.bind(path.name)
    finally:
        os.chdir(here)
