"""A burst of one million log lines: what it costs the panel, and whether pages receive every line that they show."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from labkit.benchmarks.figure import Figure
from labkit.setup.environment import CLONE

_LINES = 250_000

_BURST = f"""
import os
rank = os.environ["RANK"]
for number in range({_LINES}):
    print(f"rank {{rank}} writes line {{number}}, and it is about as long as such lines are")
"""


def burst() -> list[Figure]:
    """1,000,000 log lines of 4 ranks shown by a kernel: its response times, its memory, the lines in files and on the
    page.
    """
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "burst.py"
        script.write_text(_BURST)
        added = {"LABKIT_RUNS": str(Path(place) / "runs"), "PYTHONPATH": str(CLONE)}
        manager, client = start_new_kernel(env=os.environ | added, cwd=place, stderr=subprocess.DEVNULL)
        try:
            pages = _Pages(client)
            pages.ask("from labkit import run, show; import labkit.frontends.panel")
            kernel = psutil.Process(manager.provisioner.pid)
            before = kernel.memory_info().rss
            pages.ask(f"burst_ = show(run({str(script)!r}, nproc=4, device='cpu'))")
            answers, memory = [], []
            while pages.ask("print(burst_.folder.read_status()['state'])").strip() not in (
                "finished",
                "failed",
                "stopped",
            ):
                answers.append(pages.last_seconds * 1000)
                memory.append(kernel.memory_info().rss)
                time.sleep(0.02)
            lines = sum(
                path.read_bytes().count(b"\n") for path in Path(place).glob("runs/*/logs/*/attempt_0/*/stdout.log")
            )
            newest = pages.wait_for(f"writes line {_LINES - 1},")
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    grown = (max(memory) - before) / 1e6
    shown = "the page received the newest" if newest else "the page did NOT receive the newest"
    return [
        Figure(
            "slowest kernel response during the burst",
            max(answers),
            "ms",
            "≤ 200 ms",
            tuple(answers),
            f"median {statistics.median(answers):.0f} ms",
        ),
        Figure(
            "growth of the kernel's memory during the burst",
            grown,
            "MB",
            "≤ 100 MB",
            (grown,),
            f"{lines:,} of {4 * _LINES:,} lines are in the files; {shown}",
        ),
    ]


class _Pages:
    """A kernel client that behaves like a page, and stores the messages that the kernel sends to widgets."""

    def __init__(self, client) -> None:
        self._client = client
        self._sent: list[str] = []
        self.last_seconds = 0.0

    def ask(self, code: str) -> str:
        """Executes `code` and returns its printed output; stores the duration in `last_seconds`."""
        began, printed = time.perf_counter(), []
        request = self._client.execute(code, allow_stdin=True)
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            self._note(kind, content)
            if message["parent_header"].get("msg_id") != request:
                continue  # a widget message from another thread of the kernel
            if kind == "stream":
                printed.append(content["text"])
            elif kind == "error":
                raise RuntimeError(f"the kernel answered {content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                self.last_seconds = time.perf_counter() - began
                return "".join(printed)

    def wait_for(self, text: str, seconds: float = 20.0) -> bool:
        """Whether a widget receives `text` within `seconds`."""
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            self.ask("None")
            if any(text in sent for sent in self._sent):
                return True
            time.sleep(0.1)
        return False

    def _note(self, kind: str, content: dict) -> None:
        if kind == "comm_open" and "_esm" in content["data"].get("state", {}):
            for word in ("pong", "ready"):  # the messages of a page that has rendered its charts and logs
                answer = {"method": "custom", "content": {"kind": word}}
                self._client.shell_channel.send(
                    self._client.session.msg("comm_msg", {"comm_id": content["comm_id"], "data": answer})
                )
        elif kind == "comm_msg":
            self._sent = [*self._sent[-50:], json.dumps(content.get("data"), default=str)]
