"""Debian's Firefox, driven by its own protocol, Marionette: Playwright drives only a build of its own."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, PICTURES, wait_until

from labkit.setup.environment import FIREFOX

_SETTINGS = {
    "marionette.port": 0,  # any free one, which it writes into a file
    "ui.primaryPointerCapabilities": 6,  # a mouse: without a screen it takes itself for a device that one touches
    "ui.allPointerCapabilities": 6,
}


class Firefox:
    """One page, by commands of WebDriver: an answer is preceded by its length, a colon between them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._replies = connection.makefile("rb")
        self._numbers = count()
        self._reply()  # who it is

    def _reply(self) -> Any:
        length = b""
        while (letter := self._replies.read(1)) != b":":
            assert letter, "Firefox has ended"
            length += letter
        return json.loads(self._replies.read(int(length)))

    def ask(self, command: str, **given: Any) -> Any:
        text = json.dumps([0, next(self._numbers), command, given]).encode()
        self._connection.sendall(b"%d:%s" % (len(text), text))
        _, _, error, answer = self._reply()
        assert error is None, error
        return answer

    def goto(self, address: str) -> None:
        self.ask("WebDriver:Navigate", url=address)

    def value(self, script: str) -> Any:
        """What the body of a function returns in the page."""
        return self.ask("WebDriver:ExecuteScript", script=script, args=[], sandbox=None)["value"]

    def wait_for(self, condition: str, seconds: float = 120.0) -> None:
        """Waits until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.value(f"return Boolean({condition})"):
            if time.monotonic() > end:
                self.picture("failed-firefox")
                raise AssertionError(
                    f"not within {seconds:g} s: {condition}\n" + self.value("return document.body.innerText")
                )
            time.sleep(0.2)

    def click(self, selector: str) -> None:
        found = self.ask("WebDriver:FindElement", using="css selector", value=selector)["value"]
        self.ask("WebDriver:ElementClick", id=next(iter(found.values())))

    def picture(self, name: str) -> None:
        PICTURES.mkdir(exist_ok=True)
        shot = self.ask("WebDriver:TakeScreenshot", full=False)["value"]
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot))


@contextmanager
def firefox() -> Iterator[Firefox]:
    """The Firefox of this machine, with a profile of its own; without one, the test is skipped."""
    path = next(filter(None, map(shutil.which, FIREFOX)), None)
    if path is None:
        pytest.skip("there is no Firefox on this machine: apt-get install firefox-esr")
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as place:
        profile = Path(place)
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in _SETTINGS.items()]
        (profile / "user.js").write_text("\n".join(lines))
        quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen([path, "--headless", "--marionette", "--no-remote", "--profile", place], **quiet)
        try:
            port = profile / "MarionetteActivePort"
            wait_until(lambda: port.exists() and port.read_text(), PATIENCE)
            with socket.create_connection(("127.0.0.1", int(port.read_text())), 300) as connection:
                page = Firefox(connection)
                page.ask("WebDriver:NewSession")
                page.ask("WebDriver:SetWindowRect", width=1280, height=800)
                yield page
                page.ask("Marionette:Quit", flags=["eForceQuit"])
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
