"""The lab for assistants, over MCP (Model Context Protocol) on standard input and output: predictions, advice, recorded
runs, findings, and what files of other jobs say. Nothing runs unless `--allow-run` was given: then an assistant can
start runs, run cells on ranks that stay, and trace scripts of the user's own, which executes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

import labkit
from labkit import api
from labkit.analysis.summary import recorded_summary, summary_or_reason
from labkit.course import glossary as terms
from labkit.figures.code import write_script
from labkit.record.documents import plain
from labkit.record.folder import RunFolder
from labkit.runs.handle import Run, named, with_ranks
from labkit.runs.handle import run as started
from labkit.training.strategies import STRATEGIES
from labkit.training.workloads import WORKLOADS

_INSTRUCTIONS = (
    "labkit predicts, runs and explains PyTorch distributed training (DDP, ZeRO, FSDP, tensor, pipeline, context and"
    " expert parallel). Predict before you recommend; figures of `predict` are exact for memory and traffic, those of"
    " `advise` are modelled and have ranges. For a job that failed elsewhere, call `explain` with its logs, profiles or"
    " flight-recorder dumps."
)
_MOST = 1 << 16  # characters of a log

_Settings = Annotated[
    dict[str, Any],
    Field(
        description="other fields of a run: workload (cnn, mlp, gpt, moe, …), nproc, device (cpu or cuda), batch_size,"
        " steps, epochs, precision, seed, options (a dict of the strategy's and the workload's options)"
    ),
]
_Name = Annotated[str, Field(description="a recorded run: its name, the start or end of its name, its path, or last")]
_Tool = TypeVar("_Tool", bound=Callable[..., Any])


def server(allow_run: bool = False) -> MCPServer:
    """The server with its tools; those that execute something only with `allow_run`."""
    found = MCPServer("labkit", instructions=_INSTRUCTIONS, version=labkit.__version__, log_level="WARNING")
    for tool in (strategies, script, advise, runs, show, findings, logs, explain, glossary):
        found.tool(annotations=ToolAnnotations(read_only_hint=True))(_refusing(tool))
    found.tool(annotations=ToolAnnotations(read_only_hint=not allow_run))(_refusing(_predict(allow_run)))
    for tool in (run, stop, cell) if allow_run else ():
        found.tool(annotations=ToolAnnotations(read_only_hint=False))(_refusing(tool))
    return found


def _refusing(tool: _Tool) -> _Tool:
    """A tool whose refusals reach the client as the sentence that the command line prints."""

    @wraps(tool)
    def called(*values: Any, **fields: Any) -> Any:
        try:
            return tool(*values, **fields)
        except (ValueError, TypeError, LookupError, OSError, RuntimeError) as error:
            says = error.args[0] if isinstance(error, LookupError) and error.args else error
            raise ToolError(str(says)) from None

    return called  # type: ignore[return-value]


# ---- what only reads


def strategies() -> dict[str, Any]:
    """The strategies and workloads that can be predicted and run, with what each splits and sends."""
    rows = {name: {"title": row.title, "splits": row.splits, "sends": row.sends} for name, row in STRATEGIES.items()}
    return {"strategies": rows, "workloads": {name: row.title for name, row in WORKLOADS.items()}}


def _predict(allow_run: bool) -> Callable[..., dict[str, Any]]:
    def predict(what: str, machine: str | None = None, settings: _Settings = {}) -> dict[str, Any]:  # noqa: B006
        """Peak memory and traffic of every rank of a strategy (or of a script, its path ends in .py), without a GPU.

        `machine` adds the time of a step: a name such as h100x8.
        """
        spec = named(what, **settings)
        if spec.script is not None and not allow_run:
            raise ValueError("predicting a script executes it; start the server with: labkit mcp --allow-run")
        return api.predict(spec, machine=machine).to_json()

    return predict


def advise(
    params: Annotated[str | None, Field(description="size of the model, such as 7B")] = None,
    devices: Annotated[int, Field(description="number of GPUs")] = 8,
    machine: Annotated[str, Field(description="h100x8, a100x8, …")] = "h100x8",
    settings: Annotated[
        dict[str, Any], Field(description="batch, sequence, precision, memory, config, workload, attention")
    ] = {},  # noqa: B006
) -> dict[str, Any]:
    """Which layouts of a model fit a number of GPUs, and how fast they would be: modelled, with ranges."""
    return api.advise(params, devices=devices, machine=machine, **settings).to_json()


def script(strategy: str, settings: _Settings = {}) -> str:  # noqa: B006
    """The readable training script of a strategy, as it would run under torchrun."""
    return write_script(with_ranks(named(strategy, **settings)))


def runs(most: int = 20) -> dict[str, Any]:
    """The newest recorded runs with their figures, oldest first."""
    return {"runs": [plain(summary_or_reason(folder)) for folder in RunFolder.all()[-max(1, most) :]]}


def show(name: _Name = "last") -> dict[str, Any]:
    """The figures of a recorded run: state, losses, step time, throughput, memory and traffic of each rank."""
    return plain(recorded_summary(RunFolder.find(name)))


def findings(name: _Name = "last") -> dict[str, Any]:
    """What is wrong or slow in a recorded run, each with evidence, cause and fix."""
    return {"findings": [plain(finding.recorded()) for finding in Run.attach(name).findings()]}


def logs(name: _Name = "last", rank: int = 0, stream: Literal["stdout", "stderr"] = "stderr", lines: int = 100) -> str:
    """The end of what a rank has written."""
    text = Run.attach(name).logs(rank, stream)[-_MOST:]
    return "\n".join(text.splitlines()[-max(1, lines) :])


def explain(paths: list[str]) -> dict[str, Any]:
    """What files of a job say that ran anywhere: logs of torchrun, Slurm or Kubernetes, profiles of torch.profiler,
    dumps of the flight recorder or of torch's debug server, reports of NCCL's RAS, or their folder."""
    return api.explain(*map(Path, paths)).to_json()


def glossary(term: str) -> dict[str, Any]:
    """The definition of a term of distributed training."""
    return terms.find(term).to_json()


# ---- what runs something


def run(
    what: str,
    wait: Annotated[float, Field(description="seconds to wait for the end; the run continues afterwards")] = 60.0,
    settings: _Settings = {},  # noqa: B006
) -> dict[str, Any]:
    """Runs a strategy, or a script (its path ends in .py), under torchrun, and returns its figures."""
    running = started(what, **settings)
    running.wait(wait)
    return running.summary()


def stop(name: _Name = "last") -> dict[str, Any]:
    """Stops a run and all of its processes."""
    running = Run.attach(name)
    running.stop()
    return running.summary()


def cell(
    code: str,
    nproc: Annotated[int, Field(description="number of ranks; they are started by the first cell")] = 2,
    device: Annotated[Literal["cpu", "cuda"] | None, Field(description="default: GPUs if there are enough")] = None,
    ranks: Annotated[str, Field(description="some of them, such as 0,2 or 0-1; default: all")] = "",
    limit: Annotated[float, Field(description="seconds after which the cell is interrupted")] = 60.0,
) -> dict[str, Any]:
    """Runs Python on ranks that stay, each with the variables of the cells before it, and returns what each printed,
    the value of the last expression, and who waits for whom if a collective cannot complete. `torch`, `dist`, `rank`,
    `world_size` and `device` are there, and the process group is initialised. `stop` with the name of the returned run
    ends the ranks, and otherwise the end of the server does. These are not the ranks of a notebook.
    """
    from labkit.frontends.magic.kept import answer

    line = f"{nproc}" + (f" --device {device}" if device else "")
    succeeded, shown, name = answer(line, ranks, code, limit)
    return {"succeeded": succeeded, "shown": shown, "run": name}
