"""What the fields of a Spec declare about themselves: `Spec` checks its values by it, and the command line and the
panel are built from it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

from labkit.common.arguments import Number, shown

MANY = 1_000_000_000  # a larger value is almost certainly a typing error
STRATEGY, SCRIPT = "a strategy", "your own script"  # the two kinds of runs
WIDGET, DEFAULT = "widget", "default"  # how the panel takes a field: a widget, or only as an argument of `Lab`


class SpecError(ValueError):
    """An invalid Spec: `field` is the name of the field; the message is one sentence with the value and the fix.

    `extra` is the optional extra of the project whose packages are missing, if that is the reason.
    """

    def __init__(self, field: str, message: str, extra: str | None = None):
        super().__init__(message)
        self.field = field
        self.extra = extra


@dataclass(frozen=True)
class About:
    """The metadata of one field of Spec.

    - `help`: what the field is, in a few words; on the command line, its default is part of it.
    - `applies_to`: the kinds of runs on which the field has an effect; on others a value is refused.
    - `flag`: what stands for the value on the command line, the unit if it is a number; empty if no flag has a value.
    - `switch`: whether a flag without a value sets it to True.
    - `panel`: WIDGET, DEFAULT, or empty if the panel does not take the field.
    - `compared`: whether a comparison takes the field, with the same value for all of its runs.
    - `bounds`: the bounds of a number. `choices`: the allowed names. `check`: any other check of a single value, which
      returns it and raises `TypeError` or `ValueError`.
    """

    help: str
    applies_to: tuple[str, ...] = (STRATEGY, SCRIPT)
    flag: str = ""
    switch: bool = False
    panel: str = ""
    compared: bool = True
    bounds: Number | None = None
    choices: Collection[str] = ()
    check: Callable[[str, Any], Any] | None = None

    @property
    def on_command_line(self) -> bool:
        """Whether the field has a flag, with or without a value."""
        return self.switch or bool(self.flag)


def about(of: Field[Any]) -> About:
    """The metadata of a field of Spec."""
    found: About = of.metadata["about"]
    return found


def declared(default: Any, help: str, **more: Any) -> Any:
    """A field with a default (or a function that makes one) and its metadata, `more` as in `About`."""
    metadata = {"about": About(help, **more)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(of: Field[Any]) -> Any:
    """The default of a field."""
    return of.default if of.default_factory is MISSING else of.default_factory()


def checked(of: Field[Any], value: Any) -> Any:
    """The value of one field, checked by its metadata alone; `SpecError` if it is invalid."""
    name, known = of.name, about(of)
    if value is None and of.default is None:
        return value
    try:
        if known.bounds is not None:
            return known.bounds.check("--" + name.replace("_", "-"), value)
        if known.choices and (not isinstance(value, str) or value not in known.choices):
            raise ValueError(_one_of(name, known.choices, value))
        return value if known.check is None else known.check(name, value)
    except (TypeError, ValueError) as error:
        raise SpecError(name, str(error)) from None


def without_effect(of: Iterable[Field[Any]], values: Mapping[str, Any]) -> dict[str, str]:
    """The fields whose value has no effect on a run, by name, each with one sentence: the value and the fix."""
    script = values.get("script")
    kind = STRATEGY if script is None else SCRIPT
    found = {}
    for option in of:
        value, known = values.get(option.name, default_of(option)), about(option)
        if kind not in known.applies_to and value != default_of(option):
            found[option.name] = (
                f"{option.name}={shown(value)} applies only to your own script; name it with script='train.py'"
                if kind == STRATEGY
                else f"{option.name.replace('_', '-')} {shown(value)} applies only to a strategy; pass it to the script"
                f" {script} after --"
            )
    return found


def options_given(name: str, value: Any) -> dict[str, Any]:
    """Options by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a dict such as {{'bucket_mb': 10}}, got {shown(value)}")
    return dict(value)


def arguments_given(name: str, value: Any) -> tuple[str, ...]:
    """Arguments of a script."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise TypeError(f"{name} must be a list of strings such as ['--lr', '0.1'], got {shown(value)}")
    return tuple(value)


def unknown(name: str, known: Collection[str]) -> SpecError:
    """The refusal of a field that Spec does not have."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return SpecError(name, f"Spec has no field {shown(name)}{hint}; fields: {', '.join(known)}")


def _one_of(name: str, allowed: Iterable[str], value: Any) -> str:
    return f"{name} must be one of {', '.join(allowed)}, got {shown(value)}"
