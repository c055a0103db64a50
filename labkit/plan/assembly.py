"""Collects the definitions that a script needs, starting from one name, and puts them in order."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from labkit.plan.modules import Definition, Import, Source, in_place, of_a_workload, read_module, resolved


class Assembly:
    """The definitions that the script needs, collected by following the names that they use."""

    def __init__(self, order: list[Source], values: Mapping[str, Any]):
        self.order = order
        self.values = values
        self.found: dict[str, Definition] = {}
        self.imported: dict[str, Import] = {}

    def follow(self, name: str, home: Source) -> None:
        """Adds the definition that `name` refers to in module `home`, and everything that it uses in turn."""
        if name in self.found:
            return
        for source in (*self.order, home):
            definition = source.lookup(name, self.order)
            if definition is not None:
                self.found[name] = definition = resolved(definition, self.values)
                for used in definition.uses:
                    self.follow(used, read_module(definition.home))
                return
        if name in home.imports:
            known = self.imported.setdefault(name, home.imports[name])
            if known != home.imports[name]:
                raise ValueError(
                    f"{home.module} imports {name} as {home.imports[name]}, and another module imports it as {known}"
                )

    def write_short_in_place(self) -> None:
        """Replaces the only call of a short function by its body (`in_place`). What a strategy or a fault defines stays
        a function: it is what the script is about."""
        common = [one for one in self.found.values() if one.home == self.order[-1].module or of_a_workload(one.home)]
        for one in common:
            callers = [other for other in self.found.values() if one.name in other.uses]
            if len(callers) == 1 and (merged := in_place(self.found[one.name], *callers)):
                self.found[merged.name] = merged
                del self.found[one.name]

    def imports(self) -> str:
        """The imports, sorted as ruff sorts them: the standard library, then the rest."""
        from_module: dict[str, list[Import]] = {}
        lines: dict[bool, list[str]] = {True: [], False: []}
        used = {name for one in self.found.values() for name in one.uses}
        for one in sorted((self.imported[name] for name in used & {*self.imported}), key=lambda one: one.module):
            if one.name is None:
                lines[_standard(one.module)].append(f"import {one.module}{one.renamed}")
            else:
                from_module.setdefault(one.module, []).append(one)
        for module, those in from_module.items():
            names = ", ".join(f"{one.name}{one.renamed}" for one in sorted(those, key=_by_kind))
            lines[_standard(module)].append(f"from {module} import {names}")
        return "\n\n".join("\n".join(group) for group in lines.values() if group)

    def constants(self, notes: Mapping[str, str]) -> str:
        """The settings, the ones of the base first, each with its value and comment."""
        lines = []
        for one in self._in_order(constants=True):
            text = one.set_to(self.values[one.name]) if one.name in self.values else one.text
            lines.append(f"{text}  # {notes[one.name]}" if one.name in notes else text)
        return "\n".join(lines)

    def program(self) -> list[str]:
        """Data, model, then the functions in the order of the base; a strategy's helpers precede the functions that use
        them."""
        return [one.text for one in self._in_order(constants=False)]

    def _in_order(self, constants: bool) -> list[Definition]:
        waiting = {
            one.name: one for one in sorted(self.found.values(), key=self._position) if bool(one.value) == constants
        }
        ordered = []

        def take(one: Definition) -> None:
            for used in one.uses:
                if used in waiting:
                    take(waiting.pop(used))
            ordered.append(one)

        while waiting:
            take(waiting.pop(next(iter(waiting))))
        return ordered

    def _position(self, one: Definition) -> tuple[int, int]:
        """The sort key of a definition: settings, data, model, program, then the strategy's own definitions."""
        *_, workload, _, base = self.order
        if one.name in base.definitions:
            return (0 if one.value else 3, base.definitions[one.name].line)
        return (2 if one.home == workload.module else 1 if of_a_workload(one.home) else 4, one.line)


def _standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _by_kind(one: Import) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions."""
    name = one.name or ""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)
