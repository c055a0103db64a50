"""The measured times of collectives: latency of small messages, bandwidth of large ones; and FLOP/s."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from labkit.common.units import size
from labkit.prediction.link_table import LinkTable


def figures(table: LinkTable) -> dict[str, Any]:
    """The stored table as plain values, with `latency_seconds` and `bus_bytes_per_second` of each operation."""
    return table.to_json() | {
        "latency_seconds": {operation: table.latency(operation) for operation in table.points},
        "bus_bytes_per_second": {operation: table.bus_bandwidth(operation) for operation in table.points},
    }


def as_table(table: LinkTable) -> Group:
    """A title, and one row per operation; reasons for those that could not be measured."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("operation", "left"), ("latency", "right"), ("bus bandwidth", "right")):
        drawn.add_column(name, justify=justify)
    for operation, points in table.points.items():
        latency = f"{table.latency(operation) * 1e6:,.0f} µs ({size(points[0].size)})"
        drawn.add_row(operation, latency, f"{table.bus_bandwidth(operation) / 1e9:,.2f} GB/s ({size(points[-1].size)})")
    for operation, reason in table.missing.items():
        drawn.add_row(operation, reason)
    for precision, flops in table.peaks.items():
        drawn.add_row(f"matrix products, {precision}", "", f"{flops / 1e9:,.1f} GFLOP/s per rank")
    if table.kernels:
        launch, copies = table.kernels["launch"], table.kernels["copies"]
        drawn.add_row("copies in memory", f"{launch * 1e6:,.1f} µs per operation", f"{copies / 1e9:,.1f} GB/s per rank")
    return Group(Text(f"\nCommunication of {table.title}", style="bold"), drawn)
