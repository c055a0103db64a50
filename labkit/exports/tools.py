"""The table of tools that a run can be exported to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from labkit.common.arguments import check_choice, shown
from labkit.exports.figures import End, Row
from labkit.exports.files import Csv, ExportError, Parquet, Perfetto
from labkit.exports.trackers import Mlflow, TensorBoard, Trackio, Wandb
from labkit.setup.environment import has, how_to_add


class Writer(Protocol):
    """An export that is being written: `where` says where it is and how to open it. `end` closes it; `close` does so
    after an error."""

    where: str

    def write(self, rows: Sequence[Row]) -> None: ...

    def end(self, end: End) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tool:
    """A tool: its `title`; `make` starts an export, with the folder for it, the name of the run, its configuration and
    its start in Unix seconds; the `extra` of its client; and `keeps`, if without --out it writes where it keeps its
    runs itself."""

    title: str
    make: Callable[[Any, str, dict[str, Any], float | None], Writer]
    extra: str | None = None
    keeps: bool = False


TOOLS = {
    "tensorboard": Tool("TensorBoard", TensorBoard, "tensorboard"),
    "trackio": Tool("trackio", Trackio, "trackio", keeps=True),
    "wandb": Tool("Weights & Biases", Wandb, "wandb", keeps=True),
    "mlflow": Tool("MLflow", Mlflow, "mlflow", keeps=True),
    "perfetto": Tool("Perfetto", Perfetto),
    "csv": Tool("CSV", Csv),
    "parquet": Tool("Parquet", Parquet, "parquet"),
}


def check_tools(name: str, asked: str | Iterable[str]) -> tuple[str, ...]:
    """Names of tools, without duplicates: from one name, or several as a list or with commas. Raises `ValueError` or
    `TypeError` for an unknown one, `ExportError` if the package of one is not installed."""
    if isinstance(asked, str):
        names = [part.strip() for part in asked.split(",")]
    elif isinstance(asked, (list, tuple)):
        names = list(asked)
    else:
        raise TypeError(f"{name} must be one of {', '.join(TOOLS)}, or a list of them, got {shown(asked)}")
    for tool in names:
        check_choice(name, tool, TOOLS)
        extra = TOOLS[tool].extra
        if extra is not None and not has(extra):
            raise ExportError(
                f"an export to {TOOLS[tool].title} needs a package that is not installed; {how_to_add(extra)}"
            )
    return tuple(dict.fromkeys(names))


def place_of(tool: str, out: str | None) -> Path | None:
    """The folder for an export: `out`, or `exports/TOOL`; None if the tool keeps its runs itself."""
    if out is not None:
        return Path(out)
    return None if TOOLS[tool].keeps else Path("exports", tool)
