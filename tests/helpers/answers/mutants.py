"""Wrong answers that differ from a reference solution in a few characters."""

import itertools
import linecache
import sys
import types
from pathlib import Path

_numbers = itertools.count()


def mutant(module, name, *changes):
    """The definition `name` of a module in which each (old, new) of `changes` is replaced."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    made = types.ModuleType(f"mutant{next(_numbers)}")
    made.__file__ = f"<{made.__name__}>"
    sys.modules[made.__name__] = made
    linecache.cache[made.__file__] = (len(text), None, text.splitlines(keepends=True), made.__file__)
    exec(compile(text, made.__file__, "exec", dont_inherit=True), vars(made))
    return getattr(made, name)
