"""The types of the rows of the tables. A row holds every fact about a strategy, workload, data set or fault that other
code needs, so that no code depends on a name. Rows read no file and open no connection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.common.arguments import Number, shown
from labkit.setup.preflight import NOTHING, Needs

if TYPE_CHECKING:
    from labkit.plan.spec import Spec
    from labkit.setup.machine import Machine

# ---- options: the settings of a strategy or workload that a user can change, and their validation
#
# An option becomes one constant of the generated script: the option ``bucket_mb`` is the constant ``BUCKET_MB``. The
# options that every strategy supports, unless its row says why not, are at the end.


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


# ---- layers as parameter shapes, for formulas without torch


@dataclass(frozen=True)
class Module:
    """The shapes of a module's own parameters, and its submodules. `cut` is the dimension that tensor parallelism
    splits. `experts`: whether the submodules are experts, of which expert parallelism gives each rank some.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    inside: tuple[Module, ...] = ()
    cut: int | None = None
    experts: bool = False

    @property
    def parameters(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters, in the order of the model."""
        return self.shapes + tuple(shape for module in self.inside for shape in module.parameters)

    @property
    def size(self) -> int:
        """The number of elements of all parameters."""
        return sum(map(math.prod, self.parameters))

    @property
    def multiplied(self) -> int:
        """Elements of linear layers and convolutions; an embedding is the only matrix without bias that is never
        split."""
        most = max(map(len, self.shapes), default=0)
        looked_up = most == 2 and len(self.shapes) == 1 and self.cut is None
        own = sum(map(math.prod, self.shapes)) if most > 1 and not looked_up else 0
        return own + sum(module.multiplied for module in self.inside)

    @property
    def leaves(self) -> tuple[Module, ...]:
        """The module itself and all submodules."""
        return self, *(leaf for module in self.inside for leaf in module.leaves)

    @property
    def dense(self) -> Module:
        """The module without experts."""
        return replace(self, inside=tuple(module.dense for module in self.inside if not module.experts))

    def part(self, ranks: int) -> Module:
        """The part of one of `ranks` tensor-parallel ranks: a bias is split if its matrix is split by rows, and whole
        otherwise.
        """
        shapes = self.shapes
        if self.cut == 0:
            shapes = tuple((shape[0] // ranks, *shape[1:]) for shape in shapes)
        elif self.cut == 1:
            shapes = tuple((shape[0], shape[1] // ranks) if len(shape) == 2 else shape for shape in shapes)
        return replace(self, shapes=shapes, inside=tuple(module.part(ranks) for module in self.inside))


def linear(come: int, go: int, cut: int | None = None) -> Module:
    """A linear layer with a bias."""
    return Module(((go, come), (go,)), cut=cut)


def norm(width: int) -> Module:
    """A norm with a weight and a bias per channel."""
    return Module(((width,), (width,)))


def convolution(come: int, go: int, side: int, bias: bool = False) -> Module:
    """A two-dimensional convolution with square kernels."""
    return Module(((go, come, side, side), *[(go,)] * bias))


_DRAWN = 10_000  # samples are drawn in multiples of it, so that the size of a file tells how many it has
_LABEL = 8  # bytes of a 64-bit label, or of the byte after a sequence of text


@dataclass(frozen=True)
class Strategy:
    """One way to train on several devices.

    - `data_ranks`: the number of data-parallel ranks, that is, of different shards of each step's batch; 1 for tensor
      parallelism, because all ranks see the same samples.
    - `limit`: one sentence with the nearest working choice if the strategy cannot run a Spec, otherwise None;
      `unmet`: the same for a property that this machine lacks; `needs`: the packages that it needs.
    - `differs`: the reason if a run is expected to train something different from one process, otherwise None.
    - `processes`: the number of processes that torchrun starts; `process_group`: whether they form a process group.
    - `lacks`: the common options that the strategy does not support, each with the reason.
    - `constants`: settings of the script that follow from the Spec, by name.
    - `note`: how a run on a device ("cpu", "cuda") differs from what the title says, such as an emulation; otherwise
      empty.
    - `unmeasured`: why the measured peak memory of a step is not complete, otherwise empty.
    - `further`: listed under "more" if only a few strategies can be displayed.
    - `compared`: selected when the tab that compares strategies is opened.
    - `one_loss`: the number of adjacent ranks that must have the same loss, because they split layers and not samples:
      the degree of tensor parallelism.
    - `wrapper`: what synchronizes the gradients: "DDP", "FSDP", "DeepSpeed", or empty.
    - `autocast`: whether 16-bit precision is torch's autocast; otherwise the wrapper casts parameters and inputs.
    - `traffic`: the formulas of what it sends per step, added up, by their names in `labkit.analysis.theory.formulas`;
      None without a formula. `states`: the same for the model states of each rank, one name.
    - `layout`: the content of the checkpoints that it writes, one of `labkit.plan.checkpoints.LAYOUTS`; `reads`: the
      layouts that it can resume from, written by any number of ranks. `layout_details`: further properties of a
      checkpoint that must agree, by name.
    """

    name: str
    title: str
    splits: str
    sends: str
    data_ranks: Callable[[Spec], int]
    limit: Callable[[Spec], str | None] = lambda spec: None
    unmet: Callable[[Spec, Machine], str | None] = lambda spec, machine: None
    differs: Callable[[Spec], str | None] = lambda spec: None
    processes: Callable[[Spec], int] = lambda spec: spec.nproc
    process_group: bool = True
    default_nproc: int | None = None
    options: tuple[Option, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Spec], dict[str, Any]] = lambda spec: {}
    note: Callable[[str | None], str] = lambda device: ""
    unmeasured: Callable[[Spec], str] = lambda spec: ""
    further: bool = False
    compared: bool = False
    one_loss: Callable[[Spec], int] = lambda spec: 1
    wrapper: str = ""
    autocast: bool = True
    traffic: tuple[str, ...] | None = None
    states: str | None = None
    layout: str = "whole"
    reads: tuple[str, ...] = ("whole", "shards")
    layout_details: Callable[[Spec], dict[str, Any]] = lambda spec: {}
    needs: Needs = NOTHING

    @property
    def all_options(self) -> tuple[Option, ...]:
        """The strategy's own options, then the common options that it supports."""
        return self.options + tuple(option for option in COMMON if option.name not in self.lacks)

    @property
    def module(self) -> str:
        """The module of the training code."""
        return f"labkit.training.strategies.{self.name}"


@dataclass(frozen=True)
class Drawing:
    """The module that draws a data set, its arguments, the file that it writes to the cache folder, and the least bytes
    of that file."""

    module: str
    file: str
    arguments: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class Data:
    """A data set. `train` and `test` are numbers of samples.

    - `input_shape`: the shape of one sample without its target, for given options of the workload; `number_bytes`: the
      bytes of each of its numbers, 4 for floats, 8 for the tokens of a text.
    - `most`: the maximum number of training samples that a Spec may use, None if any number can be generated.
    - `shared`: how many times a sample contains each stored number: 3 for grey images as three channels.
    - `code`: the module that loads it, if it has a different name; `constants`: the settings of that module, by name.
    - `drawn_by`: the module next to it, a program that draws the data into the cache folder before a run; empty if
      they are not drawn.
    - `needs`: packages, and files if it is read from a folder.
    """

    name: str
    title: str
    train: int
    test: int
    input_shape: Callable[[Mapping[str, Any]], tuple[int, ...]]
    number_bytes: int = 4
    most: int | None = None
    shared: int = 1
    code: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    drawn_by: str = ""
    needs: Needs = NOTHING

    def input_bytes(self, options: Mapping[str, Any]) -> int:
        """Bytes of one sample without its target."""
        return self.number_bytes * math.prod(self.input_shape(options))

    def sample_bytes(self, options: Mapping[str, Any]) -> int:
        """Bytes of one stored sample with its target; in a sequence of text, inputs and targets share their memory."""
        return self.input_bytes(options) // self.shared + _LABEL

    def drawing(self, samples: int, options: Mapping[str, Any]) -> Drawing | None:
        """What draws at least so many training samples; None if the data set is not drawn."""
        if not self.drawn_by:
            return None
        channels, side, _ = self.input_shape(options)
        count = _DRAWN * math.ceil(max(samples, self.train) / _DRAWN)
        file = f"digits-{side}.pt"
        module = f"labkit.training.workloads.{self.drawn_by}"
        return Drawing(
            module, file, (file, *map(str, (channels, side, count))), (count + self.test) * self.sample_bytes(options)
        )

    @property
    def module(self) -> str:
        """The module that loads the data set."""
        return f"labkit.training.workloads.{self.code or self.name}"


@dataclass(frozen=True)
class Transformer:
    """The dimensions of a transformer: layers, width, heads, positions of a sequence and entries of the vocabulary."""

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int


@dataclass(frozen=True)
class Mixture:
    """The dimensions of a mixture of experts: layers, experts per layer, experts per token, and slots of an expert for
    one sample, each a token of `width` numbers."""

    layers: int
    experts: int
    chosen: int
    slots: int
    width: int


@dataclass(frozen=True)
class Workload:
    """A model and the data sets that it can train on, the default first. Functions take the options of the workload.

    - `blocks`: the parameters of each block, as shapes.
    - `outputs`: elements per sample in the output of each block, and whether tensor-parallel ranks hold only a part of
      them.
    - `costs`: floating-point operations of one sample's forward pass, block by block; matrix products and convolutions
      only, with multiplication and addition counted separately.
    - `constants`: the settings of the model's module that follow from an option, by name.
    - `tensor_parts`: the dimension that tensor parallelism splits in each layer, as (size, name); None without a
      tensor-parallel plan (`tensor_plans` in the module).
    - `partial_sums`: elements per sample of each tensor that tensor-parallel ranks add up in a step; `recomputed_sums`
      of them again if activations are recomputed. A transformer has its own formula.
    - `transformer`: the dimensions of a transformer, None for any other model.
    - `mixture`: the dimensions of a mixture of experts, whose layers add a loss; None for any other model.
    - `wide_outputs`: whether autocast leaves the outputs of the blocks in fp32.
    - `ends_in_layer`: whether the last operation of a block is a layer with parameters.
    - `visited`: modules that a forward and a backward pass visit; backward does not visit modules before the first
      parameter.
    - `batch_norm`: whether the model uses batch norm, so that the output of a sample depends on the other samples of
      its batch.
    """

    name: str
    title: str
    data: tuple[str, ...]
    blocks: Callable[[Mapping[str, Any]], tuple[Module, ...]]
    outputs: Callable[[Mapping[str, Any]], tuple[tuple[int, bool], ...]]
    costs: Callable[[Mapping[str, Any]], tuple[float, ...]]
    visited: Callable[[Mapping[str, Any]], int]
    batch_size: int = 128
    options: tuple[Option, ...] = ()
    constants: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda options: {}
    tensor_parts: Callable[[Mapping[str, Any]], tuple[int, str]] | None = None
    partial_sums: tuple[int, ...] = ()
    recomputed_sums: int = 0
    transformer: Callable[[Mapping[str, Any]], Transformer] | None = None
    mixture: Callable[[Mapping[str, Any]], Mixture] | None = None
    wide_outputs: bool = False
    ends_in_layer: bool = False
    batch_norm: bool = False
    needs: Needs = NOTHING

    def parameters(self, options: Mapping[str, Any]) -> int:
        """The number of parameters for given options."""
        return sum(math.prod(shape) for block in self.blocks(options) for shape in block.parameters)

    @property
    def module(self) -> str:
        """The module that builds the model."""
        return f"labkit.training.workloads.{self.name}"


@dataclass(frozen=True)
class Fault:
    """One fault. `shows` describes the symptom; `finding` is the name of the finding that reports it.

    `limit` gives one sentence with the fix if the fault cannot be injected into a Spec, otherwise None.
    """

    name: str
    title: str
    shows: str
    finding: str
    limit: Callable[[Spec], str | None]
