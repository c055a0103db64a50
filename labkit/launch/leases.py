"""Leases: the runs of all users of one machine take GPUs and CPU slots in turn, within the quota of the folder of
runs."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.common.files import open_regular
from labkit.common.units import counted
from labkit.setup.limits import user_name

_QUEUE = "queue"  # the file that is locked while tickets change; the first one in the folder
_SHARED = 0o666  # the locks; the folder has the sticky bit
_PATIENCE = 30.0  # seconds to wait for the lock of the queue, which is held for milliseconds
_LARGEST = 1 << 16  # bytes of a description


class LeaseError(RuntimeError):
    """Leases cannot be used; the message is one sentence with the file and the fix."""


@dataclass(frozen=True)
class Ticket:
    """One run's place: `wanted` devices of `pool`, all of one `kind` (gpu or cpu). `granted` are the devices that it
    has, since `since`; it asked at `asked` (Unix seconds)."""

    number: int
    user: str
    run: str
    kind: str
    wanted: int
    pool: tuple[str, ...]
    asked: float
    granted: tuple[str, ...] = ()
    since: float | None = None


def folder() -> Path:
    """Where the tickets of this machine are: LABKIT_LEASES, or else /tmp/labkit-leases (TMPDIR may be a user's)."""
    common = "/tmp" if os.name == "posix" else tempfile.gettempdir()
    return Path(os.environ.get("LABKIT_LEASES") or Path(common, "labkit-leases"))


class Lease:
    """The lease of this process: `take` until it returns True. It ends with this process, or with `release`."""

    def __init__(self, run: str, kind: str, wanted: int, pool: Sequence[str], place: Path | None = None):
        self._place = place or folder()
        self._lock: FileLock | None = None
        self._ahead: list[Ticket] = []
        self.ticket = Ticket(0, user_name(), run, kind, wanted, tuple(pool), time.time())
        _prepare(self._place)

    def take(self) -> bool:
        """Takes the devices if it is this run's turn and enough are free. Raises `LeaseError`."""
        with _queue(self._place):
            others = [
                ticket
                for ticket in _living(self._place, self.ticket.number)
                if set(ticket.pool) & set(self.ticket.pool)
            ]
            if self._lock is None:
                self._join()
            self._ahead = [ticket for ticket in others if ticket.granted or ticket.number < self.ticket.number]
            used = {device for ticket in others for device in ticket.granted}
            free = [device for device in self.ticket.pool if device not in used]
            if any(not ticket.granted for ticket in self._ahead) or len(free) < self.ticket.wanted:
                return False
            self.ticket = replace(self.ticket, granted=tuple(free[: self.ticket.wanted]), since=time.time())
            self._describe()
            return True

    @property
    def words(self) -> str:
        """What this run waits for, and behind whom, after `take` has returned False."""
        holders = [ticket for ticket in self._ahead if ticket.granted]
        position = 1 + sum(not ticket.granted for ticket in self._ahead)
        shown = "; ".join(f"{ticket.user} has {devices(ticket)} for {duration(ticket)}" for ticket in holders[:3])
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        return f"waiting for {devices(self.ticket)}: position {position} in the queue; {shown}{more}"

    def release(self) -> None:
        if self._lock is not None:
            _remove(self._place, self.ticket.number)
            self._lock.release()
            self._lock = None

    def _join(self) -> None:
        """Takes a number, the next one of all that there are, and holds its lock."""
        numbers = [_number(path) for path in self._place.glob("*.lock")]
        self.ticket = replace(self.ticket, number=1 + max(numbers, default=0))
        self._lock = FileLock(_lock_of(self._place, self.ticket.number), mode=_SHARED, timeout=0)
        self._lock.acquire()
        self._describe()

    def _describe(self) -> None:
        path = _description_of(self._place, self.ticket.number)
        try:
            handle, half = tempfile.mkstemp(dir=self._place)  # follows no link that another user has put there
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.ticket)))
                if hasattr(os, "fchmod"):
                    os.fchmod(handle, 0o644)
            Path(half).replace(path)
        except OSError as error:
            raise LeaseError(f"{path} cannot be written: {error.strerror}") from None


def tickets(place: Path | None = None) -> list[Ticket]:
    """The living tickets of all users, in order; those that wait have no devices. Raises `LeaseError`."""
    place = place or folder()
    if not place.is_dir():
        return []
    with _queue(place):
        return list(_living(place))


def devices(ticket: Ticket) -> str:
    """`2 GPUs`, `4 CPU slots`."""
    return counted(ticket.wanted, "GPU" if ticket.kind == "gpu" else "CPU slot")


def duration(ticket: Ticket) -> str:
    """How long a ticket has had its devices, or waits: `40 s`, `12 min`, `3.5 h`."""
    seconds = max(0.0, time.time() - (ticket.since or ticket.asked))
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _prepare(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        _require_leases(place)
        if os.name == "posix" and place.stat().st_uid == os.geteuid():
            place.chmod(0o1777)  # all users may add files, and only their owners remove them
    except OSError as error:
        raise LeaseError(
            f"{place} cannot be used for leases: {error.strerror}; set LABKIT_LEASES to another folder"
        ) from None


def _require_leases(place: Path) -> None:
    """Raises `LeaseError` for a folder of something else, in which nothing may be changed; `OSError`."""
    has_others = any(not path.stem.isdigit() for path in place.iterdir())
    if has_others and not (place / _QUEUE).exists():  # in this order: the queue is there before any file of a ticket
        raise LeaseError(f"{place} is not a folder of leases: it has other files; set LABKIT_LEASES to a new folder")


def _queue(place: Path) -> FileLock:
    """The lock of the queue, to be held as a context."""
    lock = FileLock(place / _QUEUE, mode=_SHARED, timeout=_PATIENCE)
    try:
        _require_leases(place)
        lock.acquire()
    except Timeout:
        raise LeaseError(
            f"{place / _QUEUE} has been locked for {_PATIENCE:g} s; find the process that holds it with: fuser"
            f" {place / _QUEUE}"
        ) from None
    except OSError as error:
        raise LeaseError(f"{place / _QUEUE} cannot be locked: {error.strerror}") from None
    return lock


def _living(place: Path, own: int = 0) -> Iterable[Ticket]:
    """The tickets whose processes live, in order, except one; those of the dead are removed."""
    for path in sorted(place.glob("*.lock"), key=_number):
        number = _number(path)
        if not number or number == own:
            continue
        if _is_free(path):
            _remove(place, number)
        elif (ticket := _read(place, number)) is not None:
            yield ticket


def _is_free(path: Path) -> bool:
    """Whether no process holds a lock. filelock does not open those of other users in a folder with the sticky bit."""
    try:
        with open_regular(path) as file:
            if os.name == "posix":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            else:
                with FileLock(path, timeout=0):
                    pass
    except (Timeout, OSError):
        return False
    return True


def _remove(place: Path, number: int) -> None:
    for path in (_description_of(place, number), _lock_of(place, number)):
        with suppress(OSError):  # only its owner can remove it
            path.unlink()


def _read(place: Path, number: int) -> Ticket | None:
    """A ticket from its description, which another user wrote; None if it is invalid."""
    try:
        with open(_description_of(place, number), "rb") as file:
            given = json.loads(file.read(_LARGEST))
        texts = {name: str(given[name])[:200] for name in ("user", "run", "kind")}
        pool, granted = (tuple(str(device)[:80] for device in given[name]) for name in ("pool", "granted"))
        since = None if given["since"] is None else float(given["since"])
        times = {"asked": float(given["asked"]), "since": since}
        return Ticket(number=number, wanted=int(given["wanted"]), pool=pool, granted=granted, **texts, **times)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isascii() and path.stem.isdigit() and len(path.stem) < 10 else 0


def _lock_of(place: Path, number: int) -> Path:
    return place / f"{number}.lock"


def _description_of(place: Path, number: int) -> Path:
    return place / f"{number}.json"
