"""Events of kind `saw`: what the probe observed, a few per run; see probe/observations.py and probe/elsewhere.py."""

from typing import Annotated, Literal, TypeAlias

from typing_extensions import NotRequired

from labkit.record.shapes import Number
from labkit.record.types.envelope import OfRank
from labkit.record.types.values import Count, Name


class Observed(OfRank):
    """An observation; `what` says of what."""

    kind: Literal["saw"]


class Other(Observed):
    """An observation of a newer version; its other fields pass unchecked."""

    what: Name


class Model(Observed):
    """A model that trains: its class, FSDP units and parameters."""

    what: Literal["model"]
    name: Name
    units: Count
    parameters: Count


class Loader(Observed):
    """The script iterates over a DataLoader: its numbers of batches and samples, and the class of its sampler."""

    what: Literal["loader"]
    batches: Count | None
    samples: Count | None
    sampler: NotRequired[Name | None]


class Epoch(Observed):
    """An iteration over a DistributedSampler begins: which one, the epoch `set` by set_epoch, whether it shuffles, and
    over how many ranks."""

    what: Literal["epoch"]
    sampler: Count
    set: Annotated[int, Number(-(2**53), 2**53, whole=True)]
    shuffle: bool
    ranks: NotRequired[Count | None]


class Batch(Observed):
    """A digest of the tensors of a batch, in the first steps."""

    what: Literal["batch"]
    step: Count
    digest: Name


class Item(Observed):
    """In how many of the first `steps` .item() was called between phases."""

    what: Literal["item"]
    calls: Count
    steps: Count


class Save(Observed):
    """The script called torch.save with a path."""

    what: Literal["save"]
    path: Name
    step: Count


class Input(Observed):
    """A digest of a model's inputs, in the first steps; null if they are activations, as a pipeline stage receives them
    from the previous one."""

    what: Literal["input"]
    step: Count
    digest: NotRequired[Name | None]


class StartedProcess(Observed):
    """A process that the script started: `how`, and the function or command that it runs."""

    what: Literal["process"]
    how: Name
    target: Name


class Thread(Observed):
    """A thread that trains but is not recorded."""

    what: Literal["thread"]
    name: Name


class Gradients(Observed):
    """The number of calls of backward, if the script ended without a step."""

    what: Literal["gradients"]
    backwards: Count


class NotFinite(Observed):
    """The first loss that is not finite, before the optimizer steps with it: how many parameter tensors contain NaN or
    infinities."""

    what: Literal["not_finite"]
    step: Count
    parameters: NotRequired[Count | None]
    nan: NotRequired[Count | None]
    infinite: NotRequired[Count | None]


Seen: TypeAlias = Model | Loader | Epoch | Batch | Item | Save | Input | StartedProcess | Thread | Gradients | NotFinite
