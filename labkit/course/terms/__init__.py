"""The table of the glossary: terms of distributed training, each with one definition.

A definition stands alone: it says what the symbols of its formula are. Standard library only.
"""

from labkit.course.terms import communication, data_parallel, memory, model_parallel
from labkit.course.terms.term import Term

__all__ = ["TERMS", "Term"]

TERMS = (*communication.TERMS, *data_parallel.TERMS, *model_parallel.TERMS, *memory.TERMS)
