"""The lab over MCP, by the client of the protocol's own package: a process of `labkit mcp` on stdin and stdout.

Each conversation runs in a process of its own (`python test_mcp.py NAME …`), because pytest's workers use their own
standard streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import anyio
import pytest
from fabricate import finished_folder
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

READS = {"strategies", "script", "advise", "runs", "show", "findings", "logs", "explain", "glossary", "predict"}


def converse(*arguments: str) -> None:
    """Runs one of the conversations below to its end."""
    command = [sys.executable, __file__, *arguments]
    paths = os.pathsep.join(filter(os.path.isdir, sys.path))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


async def answer(client: Client, tool: str, **arguments: Any) -> Any:
    """What a tool returns: an object, or text."""
    result = await client.call_tool(tool, arguments)
    text = result.content[0].text
    assert not result.is_error, text
    return json.loads(text) if text.startswith("{") else text


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return result.content[0].text


async def reads(client: Client, name: str, log: str) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert tools.keys() == READS, "nothing that runs something"
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools.values())
    found = await answer(client, "strategies")
    assert found["strategies"]["ddp"]["sends"] and "gpt" in found["workloads"]
    assert "init_process_group" in await answer(client, "script", strategy="ddp")
    settings = {"workload": "mlp", "nproc": 2, "device": "cpu"}
    assert len((await answer(client, "predict", what="zero1", settings=settings))["ranks"]) == 2
    assert (await answer(client, "advise", params="7B", devices=8))["fits"]
    (run,) = (await answer(client, "runs"))["runs"]
    assert run["run"] == name
    assert (await answer(client, "show"))["state"] == "finished"
    assert "findings" in await answer(client, "findings", name="last")
    (page,) = (await answer(client, "explain", paths=[log]))["pages"]
    assert page["findings"][0]["name"] == "first_failure"
    assert "reduce" in (await answer(client, "glossary", term="reduce-scatter"))["definition"]
    assert "strategy must be one of" in await refusal(client, "predict", what="dpp")
    assert "executes it" in await refusal(client, "predict", what="train.py")
    assert "absent" in await refusal(client, "show", name="absent")
    assert "cannot be read" in await refusal(client, "explain", paths=["/absent.log"])


async def runs_something(client: Client) -> None:
    assert {tool.name for tool in (await client.list_tools()).tools} == READS | {"run", "stop", "cell"}
    settings = {"workload": "mlp", "nproc": 2, "device": "cpu", "samples": 128, "batch_size": 32, "steps": 2}
    summary = await answer(client, "run", what="ddp", settings=settings, wait=120)
    assert (summary["state"], summary["world_size"]) == ("finished", 2)
    assert "step" in await answer(client, "logs", stream="stdout")
    assert (await answer(client, "stop"))["state"] == "finished", "a run that is over is not changed"
    first = await answer(client, "cell", code="x = torch.ones(1) * rank\ndist.all_reduce(x)", device="cpu")
    assert first["succeeded"] and "ran on ranks 0–1" in first["shown"]
    second = await answer(client, "cell", code="x + rank", device="cpu", ranks="1")
    assert "tensor([2.])" in second["shown"] and second["run"] == first["run"], "variables stay"
    hung = await answer(client, "cell", code="if rank == 0:\n    dist.barrier()", device="cpu")
    assert not hung["succeeded"] and "rank 0 waited in barrier" in hung["shown"]
    endless = await answer(client, "cell", code="while True: time.sleep(0.1)", device="cpu", limit=1)
    assert not endless["succeeded"] and "interrupted after" in endless["shown"]
    assert "tensor([1.])" in (await answer(client, "cell", code="x", device="cpu"))["shown"]
    assert "the cell does not parse, line 1" in await refusal(client, "cell", code="x = (", device="cpu")
    assert "2 CPU ranks stay here already" in await refusal(client, "cell", code="x", nproc=1, device="cpu")
    assert (await answer(client, "stop", name=first["run"]))["state"] == "stopped"


def test_an_assistant_reads_predicts_and_is_refused(runs, tmp_path):
    folder, log = finished_folder(runs, "ddp", 2, 0.1), tmp_path / "job.out"
    (tmp_path / "train.py").touch()
    log.write_text(
        'Traceback (most recent call last):\n  File "/x/a.py", line 4, in go\nKeyError: 1\n', encoding="utf-8"
    )
    converse("reads", folder.name, str(log))


@pytest.mark.usefixtures("runs")
def test_an_assistant_may_run_if_the_user_says_so():
    converse("runs_something")


async def main(name: str, *arguments: str) -> None:
    flags = ["--allow-run"] if name == "runs_something" else []
    server = StdioServerParameters(command=sys.executable, args=["-m", "labkit", "mcp", *flags], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        await {"reads": reads, "runs_something": runs_something}[name](client, *arguments)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
