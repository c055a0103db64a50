"""The user's cache folder, which may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder for the caches of all programs: `XDG_CACHE_HOME`, or `~/.cache`."""
    # expanduser of pathlib raises for a user without a home
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
