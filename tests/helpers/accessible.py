"""A page for people who use a keyboard alone or a screen reader: what has the focus, and what axe, a checker of
accessibility, finds."""

from __future__ import annotations

import pytest
from browser import sync_api

axe = pytest.importorskip("axe_playwright_python.sync_playwright")

# The accessible name of an element of the panel.
NAME = """element => (element.ariaLabel || [...(element.labels ?? [])].map(one => one.textContent).join(" ")
    || element.textContent || element.title || "").trim()"""

SHOWS_FOCUS = """() => {
  const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
  return outlineStyle !== "none" && outlineWidth !== "0px";
}"""


def violations(page: sync_api.Page, within: str = "html") -> list[str]:
    """What hinders people seriously in the elements that match `within`: the rule, the element, and what is wrong."""
    return [
        f"{violation['impact']} {violation['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for violation in axe.Axe().run(page, within).response["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def focused(page: sync_api.Page) -> str:
    """The name of what has the focus."""
    return page.evaluate(f"({NAME})(document.activeElement)")


def tab_to(page: sync_api.Page, panel: sync_api.Locator, name: str) -> None:
    """Presses Tab until `name` has the focus; everything on the way in the panel shows that it has it, and says its
    name."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if not panel.evaluate("panel => panel !== document.activeElement && panel.contains(document.activeElement)"):
            continue
        assert page.evaluate(SHOWS_FOCUS), f"nothing shows that {focused(page)!r} has the focus"
        assert focused(page)
        if focused(page) == name:
            return
    raise AssertionError(f"{name!r} is not reached by the Tab key")
