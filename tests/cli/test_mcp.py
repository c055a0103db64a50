"""The lab over MCP, by the client of the protocol's own package: a process of `labkit mcp` on stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from fabricate import finished_folder
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

READS = {"strategies", "script", "advise", "runs", "show", "findings", "logs", "explain", "glossary", "predict"}


def talk(session: Callable[[Client], Awaitable[None]], *flags: str) -> None:
    """Starts a server, and calls its tools in `session`."""

    async def main() -> None:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "labkit", "mcp", *flags], env=dict(os.environ)
        )
        with anyio.fail_after(300):
            async with Client(stdio_client(server)) as client:
                await session(client)

    anyio.run(main)


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


def test_an_assistant_reads_predicts_and_is_refused(runs, tmp_path):
    folder = finished_folder(runs, "ddp", 2, 0.1)
    (tmp_path / "job.out").write_text(
        'Traceback (most recent call last):\n  File "/x/a.py", line 4, in go\nKeyError: 1\n', encoding="utf-8"
    )

    async def session(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == READS, "nothing that runs something"
        assert all(tool.annotations.read_only_hint and tool.description for tool in tools.values())
        found = await answer(client, "strategies")
        assert found["strategies"]["ddp"]["sends"] and "gpt" in found["workloads"]
        assert "init_process_group" in await answer(client, "script", strategy="ddp")
        predicted = await answer(
            client, "predict", what="zero1", settings={"workload": "mlp", "nproc": 2, "device": "cpu"}
        )
        assert len(predicted["ranks"]) == 2
        assert (await answer(client, "advise", params="7B", devices=8))["fits"]
        (run,) = (await answer(client, "runs"))["runs"]
        assert run["run"] == folder.name
        assert (await answer(client, "show"))["state"] == "finished"
        assert "findings" in await answer(client, "findings", name="last")
        (page,) = (await answer(client, "explain", paths=[str(tmp_path / "job.out")]))["pages"]
        assert page["findings"][0]["name"] == "first_failure"
        assert "reduce" in (await answer(client, "glossary", term="reduce-scatter"))["definition"]
        assert "strategy must be one of" in await refusal(client, "predict", what="dpp")
        assert "executes it" in await refusal(client, "predict", what=str(tmp_path / "train.py"))
        assert "absent" in await refusal(client, "show", name="absent")
        assert "cannot be read" in await refusal(client, "explain", paths=["/absent.log"])

    talk(session)


@pytest.mark.usefixtures("runs")
def test_an_assistant_may_run_if_the_user_says_so():
    async def session(client: Client) -> None:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == READS | {"run", "stop"}
        settings = {"workload": "mlp", "nproc": 2, "device": "cpu", "samples": 128, "batch_size": 32, "steps": 2}
        summary = await answer(client, "run", what="ddp", settings=settings, wait=120)
        assert (summary["state"], summary["world_size"]) == ("finished", 2)
        assert "step" in await answer(client, "logs", stream="stdout")
        assert (await answer(client, "stop"))["state"] == "finished", "a run that is over is not changed"

    talk(session, "--allow-run")
