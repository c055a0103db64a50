"""One cell executed as a user does it: in a JupyterLab that Chromium shows, or in a kernel without a page if Chromium
or Playwright is not installed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from labkit.setup.environment import BROWSERS

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PATIENCE = 120.0  # seconds for the server, and for the page, to be ready
_NOTEBOOK = "window.jupyterapp?.shell.currentWidget"
RUN_CELL = "window.jupyterapp.commands.execute('notebook:run-cell').then(() => null)"
_IS_IDLE = f"{_NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'"


class Shown:
    """The page of the notebook, or no page."""

    def __init__(self, page: Page | None = None):
        self._page = page
        self._tools = page.context.new_cdp_session(page) if page else None
        if self._tools:
            self._tools.send("Performance.enable")

    def wait(self, seconds: float) -> None:
        """Waits while the page's messages are handled."""
        if self._page:
            self._page.wait_for_timeout(seconds * 1000)
        else:
            time.sleep(seconds)

    def counted(self) -> tuple[int | None, int | None]:
        """The bytes of the page's JavaScript heap, and the number of its DOM nodes, after a garbage collection; None
        without a page."""
        if not self._tools:
            return None, None
        self._tools.send("HeapProfiler.collectGarbage")
        metrics = {each["name"]: each["value"] for each in self._tools.send("Performance.getMetrics")["metrics"]}
        return int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"])


@contextmanager
def executed(cell: str, home: Path, environment: dict[str, str]) -> Iterator[Shown]:
    """Executes the code of a cell in a new kernel; kernel, server and browser end with the context. All their files are
    in `home`."""
    own = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data"}
    own |= {"JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings"}
    own |= {"JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    environment = environment | {name: str(home / folder) for name, folder in own.items()}
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser and find_spec("playwright") and find_spec("jupyterlab"):
        with served(cell, home, environment) as address, opened(browser, address) as page:
            page.evaluate(RUN_CELL)
            page.wait_for_selector(".labkit-chart .gtitle")
            yield Shown(page)
    else:
        with _kernel(cell, environment):
            yield Shown()


@contextmanager
def _kernel(cell: str, environment: dict[str, str]) -> Iterator[None]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager.start_kernel(env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(_PATIENCE)
        client.execute(cell, allow_stdin=True)  # as interactive front ends do: otherwise the cell waits for its run
        client.get_shell_msg(timeout=_PATIENCE)
        client.stop_channels()
        yield
    finally:
        manager.shutdown_kernel()


@contextmanager
def served(cell: str, home: Path, environment: dict[str, str]) -> Iterator[str]:
    """A JupyterLab on loopback with a notebook of this cell; returns the address of the notebook."""
    root = home / "root"
    root.mkdir()
    source = {"cell_type": "code", "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3"}
    notebook = {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}, "cells": [source]}
    (root / "long.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    argv += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--expose-app-in-browser"]
    argv += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    with open(home / "server.log", "wb") as log:
        process = subprocess.Popen(
            argv, env=environment | {"JUPYTER_TOKEN": token}, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}/lab/tree/long.ipynb?token={token}"
    finally:
        end_tree(process)


def _wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    last = time.monotonic() + _PATIENCE
    while time.monotonic() < last and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not listen on port {port} within {_PATIENCE:g} s")


@contextmanager
def opened(browser: str, address: str) -> Iterator[Page]:
    """The page of a notebook whose kernel waits for a cell."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=arguments)
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(_PATIENCE * 1000)
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_function(_IS_IDLE)
        yield page
        chromium.close()


def end_tree(process: subprocess.Popen[Any], grace: float = 20.0) -> None:
    """Terminates a process and its descendants; kills those that remain after `grace` seconds."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it has ended
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    for one in psutil.wait_procs(family, timeout=grace)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
