"""What benchmarks measured, kept in the clone: a file for each, its newest saved results, and the section of
labkit/MEASUREMENTS.md that is written from these files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.results import Result
from labkit.common.units import significant
from labkit.setup.environment import CLONE

RESULTS = Path(__file__).with_name("results")
PAGE = CLONE / "labkit" / "MEASUREMENTS.md"
BEGIN = "<!-- written by `labkit bench --save` from tests/bench/results/ -->"
END = "<!-- end of what benchmarks write -->"


def save(bench: Callable[..., list[Result]], figures: Sequence[Result], machine: str, date: str) -> None:
    """Replaces the file of one benchmark by these results; `machine` says where they were measured, and under which
    load."""
    record = {
        "what": " ".join(bench.__doc__.split()),
        "date": date,
        "machine": machine,
        "figures": [asdict(figure) for figure in figures],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / f"{bench.__name__}.json").write_text(text, encoding="utf-8")


def write(names: Sequence[str]) -> None:
    """Writes the section of the page anew; `names` are those of all benchmarks, in the order of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{section(names)}\n{END}{after}", encoding="utf-8")


def section(names: Sequence[str]) -> str:
    """A heading and a table for each benchmark with saved results."""
    paths = [RESULTS / f"{name}.json" for name in names]
    return "\n".join(_part(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists())


def _part(name: str, record: dict[str, Any]) -> str:
    lines = [f"### {name}", "", f"{record['what']} {record['date']}; {record['machine']}.", ""]
    lines += ["| what | median | least to most | target | note |", "| --- | --- | --- | --- | --- |"]
    for figure in record["figures"]:
        median = "–" if figure["median"] is None else f"{significant(figure['median'])} {figure['unit']}"
        cells = (figure["name"], median, _spread(figure["each"]), figure["aim"] or "–", figure["note"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "once"
    return f"{significant(min(values))} to {significant(max(values))}, {len(values)} times"
