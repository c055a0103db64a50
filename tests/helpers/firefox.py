"""Debian's Firefox, driven by its own protocol, Marionette: Playwright drives only a build of its own."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import PICTURES

from labkit.setup.environment import FIREFOX

marionette = pytest.importorskip("marionette_driver.marionette")


class Firefox:
    """One page. A script is the body of a function, whose value must be JSON."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def goto(self, address: str) -> None:
        self.driver.navigate(address)

    def value(self, script: str) -> Any:
        return self.driver.execute_script(script, sandbox=None)

    def wait_for(self, script: str, seconds: float = 120.0) -> Any:
        """The value of `script` as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.value(script):
                return value
            time.sleep(0.2)
        self.picture("failed-firefox")
        raise AssertionError(f"not within {seconds:g} s: {script}\n{self.value('return document.body.innerText')}")

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def picture(self, name: str) -> None:
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"{name}.png").write_bytes(self.driver.screenshot(format="binary", full=False))


@contextmanager
def firefox() -> Iterator[Firefox]:
    """The Firefox of this machine, with a profile of its own; without one, the test is skipped."""
    path = next(filter(None, map(shutil.which, FIREFOX)), None)
    if path is None:
        pytest.skip("there is no Firefox on this machine: apt-get install firefox-esr")
    with tempfile.TemporaryDirectory(prefix="labkit-") as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        driver = marionette.Marionette(
            bin=path, headless=True, port=port, workspace=place, gecko_log=f"{place}/firefox.log", startup_timeout=120
        )
        try:
            driver.start_session()
            driver.set_window_rect(width=1280, height=800)
            yield Firefox(driver)
        finally:
            driver.quit()
            driver.cleanup()
