"""A real kernel as an interactive notebook uses it."""

from __future__ import annotations

import time

import jupyter_client

SECONDS = 240  # timeout of a cell on a busy machine


class Front:
    """An interactive notebook client: it accepts input requests, stores displayed output, and can interrupt."""

    def __init__(self, manager: jupyter_client.KernelManager, client: jupyter_client.BlockingKernelClient):
        self.manager, self.client = manager, client
        self.shown: dict[str, str] = {}

    def do(self, code: str) -> str:
        """Executes code and returns its printed output."""
        printed = []

        def hear(message) -> None:
            self.take(message)
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        self.client.execute_interactive(code, allow_stdin=True, timeout=SECONDS, output_hook=hear)
        return "".join(printed)

    def begin(self, code: str) -> str:
        """Starts executing code; `end` waits for it."""
        return self.client.execute(code, allow_stdin=True)

    def end(self, request: str, kind_of_text: str = "text/plain") -> str:
        """Waits until a request has been executed, and returns all that it shows, as text or as HTML."""
        return "\n".join(filter(None, (bundle.get(kind_of_text) for bundle in self._bundles(request))))

    def displays(self, code: str) -> list[dict]:
        """Executes code and returns each output at its end, by MIME type."""
        return self._bundles(self.begin(code))

    def _bundles(self, request: str) -> list[dict]:
        bundles: dict[str, dict] = {}
        deadline = time.monotonic() + SECONDS
        while True:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.0))
            self.take(message)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return list(bundles.values())
            place = content.get("transient", {}).get("display_id") or str(len(bundles))
            if "data" in content:
                bundles[place] = content["data"]
            elif kind in ("stream", "error"):
                text = content["text"] if kind == "stream" else f"{content['ename']}: {content['evalue']}"
                bundles[place] = dict.fromkeys(("text/plain", "text/html"), text)

    def shows(self, code: str, kind_of_text: str = "text/plain") -> str:
        """Executes code and returns all that it shows at its end, as text or as HTML."""
        return self.end(self.begin(code), kind_of_text)

    def answers(self, code: str, *texts: str) -> tuple[list[str], str]:
        """Executes code and answers what it asks, one text after the other; returns the prompts, and all that it
        shows."""
        request, prompts = self.begin(code), []
        for text in texts:
            prompts.append(self.client.get_stdin_msg(timeout=SECONDS)["content"]["prompt"])
            self.client.input(text)
        return prompts, self.end(request)

    def take(self, message) -> None:
        """Stores displayed output by its display id."""
        place = message["content"].get("transient", {}).get("display_id")
        if place:
            self.shown[place] = message["content"]["data"].get("text/plain", "")

    def sees(self, words: str) -> bool:
        """Whether `words` are displayed, after reading all pending messages."""
        while self.client.iopub_channel.msg_ready():
            self.take(self.client.get_iopub_msg())
        return any(words in text for text in self.shown.values())

    def completes(self, code: str) -> list[str]:
        """The completions at the end of code."""
        return self._reply(self.client.complete(code, len(code)))["matches"]

    def inspects(self, code: str) -> str:
        """What Shift-Tab shows at the end of code."""
        return self._reply(self.client.inspect(code, len(code)))["data"].get("text/plain", "")

    def _reply(self, request: str) -> dict:
        while True:
            reply = self.client.get_shell_msg(timeout=SECONDS)
            if reply["parent_header"].get("msg_id") == request:
                return reply["content"]
