"""What a row of the tables needs on a machine, as plain values: the tables declare it, `labkit.setup.preflight` checks
it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Files:
    """The files of a data set, relative to the data folder, and where they are downloaded from.

    Each entry of `required` is a tuple of alternatives, of which one must exist. `put` says which files to put into
    `folder` by hand.
    """

    title: str
    folder: str
    required: tuple[tuple[str, ...], ...]
    host: str
    put: str


@dataclass(frozen=True)
class Needs:
    """The requirements of a strategy, workload or data set in addition to torch.

    - `extra`: the optional extra of the project that adds its package; `module` and `package` name a package of the
      lab's own requirements instead, as it is imported and as it is installed.
    - `files`: the files that are read, downloaded if possible.
    - `instead`: the nearest choice that needs none of this, as a user writes it.
    """

    extra: str | None = None
    module: str = ""
    package: str = ""
    files: Files | None = None
    instead: str = ""


NOTHING = Needs()
