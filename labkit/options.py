"""A named choice with a default: what a strategy or a workload lets a person set, and how it is checked.

An option becomes one constant of the written-out script: the option ``bucket_mb`` is the setting ``BUCKET_MB``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One setting of a strategy or workload; the type of `default` is the type of the setting."""

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None

    def parse(self, given: Any) -> Any:
        """The value that `given` (a value or its text) stands for; ValueError says what is allowed."""
        try:
            value = self._convert(given)
        except (TypeError, ValueError):
            value = None
        if value is None or (self.choices and value not in self.choices):
            raise ValueError(self.allowed)
        if self.minimum is not None and value < self.minimum:
            raise ValueError(self.allowed)
        return value

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        kind = {int: "a whole number", float: "a number"}.get(type(self.default), "a text")
        return kind if self.minimum is None else f"{kind} of at least {self.minimum:g}"

    def _convert(self, given: Any) -> Any:
        kind = type(self.default)
        if kind is bool:
            return given if isinstance(given, bool) else _WORDS.get(str(given).strip().lower())
        if kind is int and (isinstance(given, bool) or (isinstance(given, float) and not given.is_integer())):
            return None
        return kind(given)
