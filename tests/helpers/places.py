"""Where the tests find their files."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent  # of the clone
HELPERS = TESTS / "helpers"
RECORDED = TESTS / "recorded"  # run folders of earlier versions
SCREENSHOTS = TESTS / "screenshots"
SCHEMAS = TESTS / "schemas"
SCRIPTS = TESTS / "scripts"
BY_HAND = TESTS / "bench" / "by_hand"  # scripts that generated ones are compared with
