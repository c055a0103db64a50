"""Runs in which every field of every event and document is filled, by the published schemas: with any text, such as
one that asks for the address of a beacon when something interprets it."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fabricate import FakeRun

from labkit.record.documents import schemas
from labkit.record.folder import RunFolder

_DIVERGED = 31  # the step after those of the run, whose loss is NaN
Text = Callable[[str], str]  # the text of a field, by its path such as `error.message`


# ---- a beacon


class Beacon(ThreadingHTTPServer):
    """A server on this machine's loopback, and the paths that it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []

    def text(self, path: str) -> str:
        """A text that asks for `path` if a browser or plotly interprets it as HTML, SVG, CSS or Markdown."""
        url = f"http://127.0.0.1:{self.server_address[1]}/{path}"
        return (
            f'<b style="background:url({url}/b)">x</b><a href="{url}/a">y</a><img src="{url}/i"><span'
            f" style='font-size:10px;background:url({url}/s)'>z</span><style>@import '{url}/c';</style>"
            f"<script>fetch('{url}/f')</script><svg onload=\"fetch('{url}/o')\"><image href='{url}/h'/></svg>"
            f'![m]({url}/m) &lt;img src="{url}/e"&gt; \'"><iframe src="{url}/q"></iframe> {path}'
        )


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def beacon() -> Iterator[Beacon]:
    """A beacon that is asked by nobody, as the test will see."""
    server = Beacon()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---- every field, by the published schemas


def example(schema: dict[str, Any], path: str, text: Text) -> Any:
    """A value that follows a JSON Schema of the published ones, with all fields, and `text` wherever it may be."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], path, text)
    kind = schema.get("type")
    if kind == "object":
        values = {name: example(one, f"{path}.{name}", text) for name, one in schema.get("properties", {}).items()}
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            key = "0" if "propertyNames" in schema else text(f"{path}.key")
            values[key] = example(more, f"{path}.*", text)
        return values
    if kind == "array":
        items = [example(one, f"{path}.{number}", text) for number, one in enumerate(schema.get("prefixItems", ()))]
        return items or [example(schema["items"], f"{path}.*", text)]
    if kind == "string":
        found = text(path)[: schema.get("maxLength")]
        return found if re.search(schema.get("pattern", ""), found) else "0"
    if kind in ("integer", "number"):
        return max(schema.get("minimum", 1), min(1, schema.get("maximum", 1)))
    return {"boolean": True, "null": None}[kind] if kind else text(path)


def events(text: Text) -> dict[str, dict[str, Any]]:
    """An event of every kind and observation, with all fields; a start first, because it begins anew."""
    found = {}
    kinds = schemas()["events"]["schema"]["$defs"]
    for name, schema in sorted(kinds.items(), key=lambda item: item[0] != "start"):
        event = example(schema, name, text)
        event |= {"rank": 0, "t": 0.0} | ({"step": 1} if "step" in event else {})
        if name in ("step", "saw.not_finite"):
            event["step"] = _DIVERGED
        if name == "memory_step":
            event |= {"times": [0.0], "owners": {key: [1] for key in (text(f"{name}.owners"), "parameters")}}
        found[name] = event
    return found


def documents(text: Text) -> dict[str, dict[str, Any]]:
    """Every document of a run folder by name, with all texts that it may have."""
    published = schemas()
    failure = {name: text(f"failures.{name}") for name in ("message", "traceback", "signal")}
    who = {"pid": 1, "create_time": 1.0, "host": text("supervisor.host"), "boot": text("supervisor.boot")}
    spec = {"strategy": "ddp", "workload": "cnn", "nproc": 2, "steps": 30, "device": "cpu", "batch_size": 128}
    op, memory = {"calls": 1, "bytes": 4, "sent": 4}, {text("plan.owner"): 1, "parameters": 2}
    times = {"seconds": 0.1, "phases": [[text("plan.phase"), 0.0, 0.1], ["forward", 0.0, 0.1]]}
    rank = {"rank": 0, "like": 0, "peak_memory_bytes": 9, "at_peak": memory, "phase_at_peak": text("plan.phase_at")}
    step = {"times": [0.0], "owners": {name: [1] for name in memory}, "peak": 3, "at_peak": memory, **times}
    comm = [[text("plan.op"), 0.0, 0.1, 4, text("plan.group"), [0, 1], 1]]
    plan = {
        **{"v": 1, "spec": spec, "method": "simulated", "reason": text("plan.reason")},
        "ranks": [rank | {"memory_bytes": memory, "comm_bytes_per_step": 4}],
        "classes": [
            {
                **{"ranks": [0, 1], "step": step, "ops": {text("plan.ops"): op}, "calls": [[text("plan.call"), 4, 2]]},
                "timeline": times | {"comm": comm, "busy": [[0.0, 0.1]], "exposed": {"backward": 0.01}},
                "estimates": [{"name": text("plan.estimate"), "low": 1, "high": 2, "source": text("plan.source")}],
            }
        ],
        "time": {"seconds": 0.1, "links": text("plan.links")},
        "peak": {"flops": 1.0, "source": text("plan.peak")},
        "fit": {"limit_bytes": 9, "low_bytes": 1, "high_bytes": 2, "source": text("plan.fit")},
    }
    return {
        "spec.json": spec | {"args": [text("spec.args")], "options": {text("spec.option"): text("spec.value")}},
        "status.json": {
            **{name: text(f"status.{name}") for name in ("message", "waiting", "cold_because")},
            **{"state": "failed", "started": 0.0, "exit_code": 1, "supervisor": who, "agent": who},
            "failures": {"0": failure, "1": failure},
        },
        "launch.json": {
            **{"argv": [text("launch.argv")], "env": {text("launch.key"): text("launch.env")}},
            **{name: text(f"launch.{name}") for name in ("cwd", "cold_because", "engine", "endpoint")},
        },
        "plan.json": plan,
        "guess.json": example(published["guess"]["schema"], "guess", text) | {"v": 1},
        "summary.json": example(published["summary"]["schema"], "summary", text)
        | {"v": 1, "name": text("summary.name")},
    }


def full_run(root: Path, text: Text, without: tuple[str, ...] = ()) -> RunFolder:
    """A run of two ranks that has failed, in which every event and document has `text`, except those in `without`."""
    run = FakeRun(root, steps=30)
    run.start()
    run.step(30)
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            run.say(rank, f"{text('log')}\n", stream)
    run.close()
    late = run.newest
    for name, event in events(text).items():
        if name in without:
            continue
        files = [run.folder.system] if name == "system" else [run.folder.events_of(rank) for rank in range(2)]
        for rank, path in enumerate(files):
            late += 0.001
            moments = {field: late for field in ("t", "t0", "since", "began") if field in event}
            own = event | moments | ({} if name == "system" else {"rank": rank})
            own |= {"loss": math.nan} if name == "step" else {}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(own) + "\n")
    for name, document in documents(text).items():
        if name not in without:
            (run.folder.path / name).write_text(json.dumps(document), encoding="utf-8")
    RunFolder.write_json(
        run.folder.status, json.loads(run.folder.status.read_text()) | {"started": run.began, "ended": late}
    )
    run.folder.script.write_text(text("script"), encoding="utf-8")
    run.folder.command.write_text(text("command"), encoding="utf-8")
    run.folder.launcher_log.write_text(text("torchrun"), encoding="utf-8")
    return run.folder


def diverged_run(root: Path) -> RunFolder:
    """A run whose loss is NaN in its last step."""
    run = FakeRun(root, steps=_DIVERGED)
    run.start()
    run.step(_DIVERGED - 1)
    for rank, writer in enumerate(run.writers):
        writer.write("step", t=run.newest + 1, **run.measured(rank) | {"step": _DIVERGED, "loss": math.nan})
    run.end()
    run.close()
    return run.folder
