"""Options: the settings of a strategy or workload that a user can change, and their validation.

An option becomes one constant of the generated script: the option ``bucket_mb`` is the constant ``BUCKET_MB``. The
options that every strategy supports, unless its row says why not, are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.common.arguments import Number, shown

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Option:
    """One setting of a strategy or workload; the type of `default` is the type of the setting.

    A numeric setting without `choices` needs a `minimum` and a `maximum`, both inclusive.
    """

    name: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if self._is_number and not self.choices and (self.minimum is None or self.maximum is None):
            raise TypeError(f"option {self.name} is a number and needs a minimum and a maximum")

    def parse(self, given: Any) -> Any:
        """The value of `given`, which is a value or its text; `ValueError` names the allowed values."""
        value = self._convert(given)
        if value is None or (self.choices and value not in self.choices):
            raise ValueError(f"option {self.name} must be {self.allowed}, got {shown(given)}")
        return value

    @property
    def bounds(self) -> Number | None:
        """The bounds of a numeric setting; None for a setting of another type."""
        if not self._is_number:
            return None
        low, high = (min(self.choices), max(self.choices)) if self.choices else (self.minimum, self.maximum)
        return Number(type(self.default), low, high)

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        return self.bounds.allowed if self.bounds else "a string"

    @property
    def _is_number(self) -> bool:
        return isinstance(self.default, (int, float)) and not isinstance(self.default, bool)

    def _convert(self, given: Any) -> Any:
        if isinstance(self.default, bool):
            return _WORDS.get(str(given).strip().lower()) if isinstance(given, (bool, str)) else None
        if isinstance(self.default, str):
            return given if isinstance(given, str) else None
        value = self.bounds.from_text(given) if isinstance(given, str) else given
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return self.bounds.check(self.name, value)
        except ValueError:
            return None


MOST = 65_536  # maximum number of ranks, micro-batches and the like
INPUT_PIPELINE: tuple[Option, ...] = (
    Option(
        "fetch",
        "samples",
        "load the samples of a batch one by one, or index a whole batch at once",
        choices=("samples", "batches"),
    ),
    Option("workers", 0, "data loader worker processes per rank", minimum=0, maximum=64),
    Option("pin_memory", True, "load batches into page-locked memory, which a GPU can copy asynchronously"),
    Option("non_blocking", True, "continue while a batch is copied to the GPU"),
)
# What changes the update of a step, and therefore the training.
UPDATE: tuple[Option, ...] = (
    Option("clip_norm", 0.0, "maximum norm of all gradients; 0: no clipping", minimum=0.0, maximum=1e12),
    Option("warmup_steps", 0, "steps over which the learning rate rises linearly", minimum=0, maximum=10**9),
    Option(
        "lr_decay",
        "none",
        "how the learning rate falls from then on, to 0 after the last step",
        choices=("none", "linear", "cosine"),
    ),
)
COMMON: tuple[Option, ...] = (
    Option("accumulate", 1, "micro-batches per step, to use less memory for the same update", minimum=1, maximum=MOST),
    *UPDATE,
    Option("checkpoint_activations", False, "discard the activations inside each block and recompute them in backward"),
    Option("compile", False, "compile each block with torch.compile"),
    *INPUT_PIPELINE,
)
