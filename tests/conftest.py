"""What every test shares: run folders of its own, a way to wait, and the proof that nothing is left behind."""

from __future__ import annotations

import gc
import math
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

# fixtures that several modules use
from bootstrapping import calls as calls
from bootstrapping import place as place
from building import forked_ranks as forked_ranks
from building import forks as forks
from packages import torchvision as torchvision
from places import SCREENSHOTS

from labkit.launch.warm import client
from labkit.runs.handle import Run, settle
from labkit.runs.handle import start as start_run

# jsonschema imports it if it is there: it compiles 38 grammars, for formats of addresses that nothing here checks
sys.modules.setdefault("rfc3987_syntax", None)
# modules and tests live as long as the process; looking through them again and again took a tenth of its time
gc.set_threshold(10_000, 10, 10)

PATIENCE = 180.0  # seconds that a test waits for a server on a busy machine
FAILED = pytest.StashKey[bool]()  # whether the function of a test raised
REFUSED = pytest.StashKey[bool]()  # whether a test of --quick was about to start a process
RUNNING: list[pytest.Item] = []  # the test that runs
START_TOO_SLOW = "[anywidget] Failed to initialize model."  # the panel then opens the widget again
NOTEBOOK_7 = (  # errors of its own while it opens: settings of the toolbar are late, and it has no file browser here
    "Cannot read properties of undefined (reading 'schema')",
    "Command 'filebrowser:open-path' not registered.",
)
PICTURES = SCREENSHOTS
# for a test whose cold round shows nothing that the cold round of another one does not show
COLD_IS_SLOW = pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.slow)], indirect=True)
# what --quick leaves out
LONG = ("browser", "thorough")  # markers
LAUNCHES = {"bystander", "chromium", "forks", "jupyterlab", "server", "shared_run", "start"}  # fixtures
CASES = 3  # of a test with many parameters, evenly spread


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"tests that start neither Python nor a browser (one that would is skipped there), {CASES} cases of each",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="also run the slow tier: every lab live in a browser, the long cells of labs, the long list of faults, …",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, slow tests are left out, unless they were named; with --quick, thorough ones, those whose fixtures
    start processes, and most cases of those with many. The longest come first, so that all workers end at about the
    same time; those in a browser together, so that one worker starts a JupyterLab and a Chromium."""
    items.sort(key=lambda item: (item.path.name != "test_labs.py", not item.get_closest_marker("browser")))
    everything = list(items)
    are_named = any("::" in argument for argument in config.args)
    if not config.getoption("--all") and not are_named:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("--quick"):
        items[:] = [
            item
            for item in items
            if not any(map(item.get_closest_marker, LONG)) and not LAUNCHES & set(item.fixturenames)
        ]
        if not are_named:
            items[:] = a_few_cases(items)
    kept = set(items)
    config.hook.pytest_deselected(items=[item for item in everything if item not in kept])


def a_few_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """At most `CASES` items of each function, evenly spread."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for several in cases.values() for item in several[:: math.ceil(len(several) / CASES)]]


class Launched(pytest.skip.Exception):
    """A test of --quick was about to start a process. What is tested does not catch it: it is no `Exception`."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        sys.addaudithook(refuse_to_launch)


def refuse_to_launch(event: str, arguments: tuple) -> None:
    """Skips the test that runs, if any, when it starts Python or forks; programs such as ruff are quick."""
    program = Path(os.fsdecode(arguments[0])).name if event == "subprocess.Popen" else ""
    if (event == "os.fork" or program.startswith("python")) and RUNNING:
        launch_nothing()


def launch_nothing() -> None:
    RUNNING[-1].stash[REFUSED] = True
    raise Launched("it starts a process")


def start_no_server(environment: dict[str, str]) -> None:
    """Instead of a warm server: threads that would start one go on, a test that would wait for it is skipped."""
    if threading.current_thread() is threading.main_thread():
        launch_nothing()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    RUNNING.append(item)
    result = yield
    RUNNING.pop()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    """Notes on a test whether it failed, for the fixtures that end after it."""
    report = yield
    if report.failed and item.stash.get(REFUSED, False):  # a thread of it was about to start a process
        report.outcome, report.longrepr = "skipped", (__file__, 0, "Skipped: it starts a process")
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True, scope="session")
def warm_server(pytestconfig):
    """A warm server of this process's own, which forks the ranks of most tests; gives a function that waits until it is
    there. With --quick there is none."""
    place = tempfile.mkdtemp(prefix="labkit-")  # a socket's path must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("LABKIT_LEASES", f"{place}/leases")  # other users of this machine do not delay the tests
        if pytestconfig.getoption("--quick"):
            patch.setattr(client, "_start_server", start_no_server)
            patch.setattr(multiprocessing.util, "spawnv_passfds", lambda *_: launch_nothing())  # no event is raised
        else:
            client.prepare()
            if client._AVAILABLE and not os.environ.get(client.FORCE_COLD):
                wait_until(client.server_log().exists)  # a test may replace what the thread that starts it uses
        yield server_for_this_process
        found = client.about()
        if isinstance(found, dict):
            psutil.Process(found["pid"]).kill()
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def shared_run(warm_server, tmp_path_factory) -> Callable[..., Run]:
    """`warm_run` for runs that several tests look at and none changes: one for the same arguments, in this process."""
    known: dict[str, Run] = {}

    def of(what: object, **fields: Any) -> Run:
        spec = settle(what, **fields)
        if repr(spec) not in known:
            known[repr(spec)] = warm_run(spec, tmp_path_factory.mktemp("shared"))
        return known[repr(spec)]

    return of


@pytest.fixture(params=["warm", "cold"])
def start(request, warm_server, monkeypatch):
    """Runs of this test start warm, and in another round of it cold."""
    if request.param == "cold":
        monkeypatch.setenv(client.FORCE_COLD, "1")
    else:
        warm_server()
        monkeypatch.setattr(client, "ANSWER", PATIENCE)
    return request.param


@pytest.fixture
def patient(monkeypatch):
    """Raises the warm server's answer timeout, for a busy machine."""
    monkeypatch.setattr(client, "ANSWER", PATIENCE)


@pytest.fixture
def server(warm_server, patient) -> dict:
    """The warm server of this process, which forks the runs of the test."""
    return warm_server()


@pytest.fixture
def bystander():
    """Starts processes that wait, and kills them after the test."""
    from lifetimes import bystanders

    with bystanders() as begin:
        yield begin


@pytest.fixture
def script(tmp_path, start) -> Callable[[str], Path]:
    """Writes a script that the test runs, warm and cold."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Run folders go to this test's own place; at its end no process of any of them may be left."""
    root = tmp_path / "runs"
    monkeypatch.setenv("LABKIT_RUNS", str(root))
    yield root
    if root.exists():  # most tests start nothing
        left = end_processes_of(root)
        assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def jupyterlab(warm_server):
    """One JupyterLab for all tests of this process, whose ranks the warm server starts."""
    import browser

    with browser.jupyterlab() as server:
        yield server


@pytest.fixture
def jupyter(jupyterlab, warm_server):
    """This test's folder in JupyterLab, and its run folders; no kernel and no process of a run may outlive the test."""
    warm_server()
    with jupyterlab.clone() as own:
        yield own


@pytest.fixture(scope="session")
def chromium():
    """One Chromium for all tests of this process."""
    import browser

    with browser.chromium() as started:
        yield started


@pytest.fixture
def page(chromium, jupyter, request):
    """A page in a new context, as wide as a projector; an error in it fails the test. It closes before kernels end.

    If the test fails, its report has what the page and its console said, and there is a picture of the page.
    """
    errors: list[str] = []
    console: list[str] = []
    context = chromium.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type != "debug" and console.append(message.text[:300]))
    yield page
    if request.node.stash.get(FAILED, False):
        page.screenshot(path=PICTURES / f"failed-{request.node.name}.png")
        print(page.locator("body").inner_text()[-4000:], *console[-40:], sep="\n")
    context.close()
    assert not [one for one in errors if one not in (START_TOO_SLOW, *NOTEBOOK_7)]


def end_processes_of(root: Path, seconds: float = 0.0) -> list[psutil.Process]:
    """The processes of run folders under `root` that have not ended by themselves after `seconds`; they are killed."""
    end = time.monotonic() + seconds
    while (left := processes_of(str(root))) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        process.kill()
    return left


def processes_of(tag: str) -> list[psutil.Process]:
    """The processes whose environment names a run folder under `tag`, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("LABKIT_RUN_DIR", "")
        except psutil.Error:
            continue
        if folder.startswith(tag) and process.pid != os.getpid():
            found.append(process)
    return found


def warm_run(what: object, root: Path | None = None, **fields: Any) -> Run:
    """A run at its end, forked from the warm server however busy the machine is; the arguments are `labkit.run`'s.

    Its folder is made in `root`, which is else this test's own place for runs.
    """
    return started_warm(what, root, **fields).wait(300)


def started_warm(what: object, root: Path | None = None, **fields: Any) -> Run:
    """`warm_run` that does not wait for the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "ANSWER", PATIENCE)
        if sys.platform == "linux":  # there is no server elsewhere
            server_for_this_process()
        started = Run(start_run(settle(what, **fields), root=root))
    if sys.platform == "linux" and not os.environ.get(client.FORCE_COLD):
        plan = started.folder.read_launch()
        assert plan.start == "warm", plan.cold_because
    return started


def server_for_this_process() -> dict:
    """Waits for a warm server that answers, and starts one if there is none."""
    if isinstance(client.about(), client.Cold):
        client.prepare()
    return server_is_ready()


def server_is_ready(other_than: int = 0) -> dict:
    """Waits for a warm server that answers, and is another process than this; gives what it says about itself."""
    if RUNNING and RUNNING[-1].config.getoption("--quick"):
        raise Launched("it needs the warm server")

    def answer() -> dict | None:
        found = client.about()
        return found if isinstance(found, dict) and found["pid"] != other_than else None

    return wait_until(answer, PATIENCE)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> object:
    """Polls `condition` until it is true, and gives back what it gave; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {condition}")
