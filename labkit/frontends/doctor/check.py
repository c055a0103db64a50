"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

REINSTALL = "let the lab create its own environment: deactivate this one, then run python3 -m labkit setup"


@dataclass(frozen=True)
class Check:
    """One line: `level` is fine, degraded or broken, `says` is the result, `fix` the fix (empty if all is fine)."""

    name: str
    level: str
    says: str
    fix: str = ""


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
