"""The documents of a run folder, except the summary: `spec.json`, `status.json`, `launch.json` and `capture.json`."""

from typing import Annotated

from typing_extensions import NotRequired, TypedDict

from labkit.record.schema import Limits
from labkit.record.shapes import Number
from labkit.record.types.summary import StartMode, State
from labkit.record.types.values import RANKS, Code, Count, Line, Name, Pid, Seconds, Time, World


class SpecFields(TypedDict):
    """The fields of `Spec`, which itself checks their combinations."""

    scaling: NotRequired[Name]
    device: NotRequired[Name]
    max_restarts: NotRequired[Count]
    sample_every: NotRequired[Count]
    hang_after: NotRequired[Count]
    seed: NotRequired[Annotated[int, Number(-(2**64), 2**64, whole=True)]]
    tensors: NotRequired[bool]
    checkpoint_async: NotRequired[bool]
    as_module: NotRequired[bool]
    args: NotRequired[Annotated[list[Line], Limits(most=10_000)]]
    options: NotRequired[dict[str, Name | float | bool | None]]
    strategy: NotRequired[Name | None]
    workload: NotRequired[Name | None]
    precision: NotRequired[Name | None]
    data: NotRequired[Name | None]
    fault: NotRequired[Name | None]
    data_dir: NotRequired[Line | None]
    script: NotRequired[Line | None]
    resume: NotRequired[Line | None]
    batch_size: NotRequired[Count | None]
    epochs: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    samples: NotRequired[Count | None]
    save_every: NotRequired[Count | None]
    nproc: NotRequired[World | None]


class Who(TypedDict):
    """A process: its pid and start time, on which host, in which boot and container."""

    pid: Pid
    create_time: Time
    host: NotRequired[Name | None]
    boot: NotRequired[Name | None]


class Failed(TypedDict):
    """How a rank failed, as torchrun reported it or as its traces show."""

    message: NotRequired[str]
    traceback: NotRequired[str]
    last_seen: NotRequired[bool]
    exit_code: NotRequired[Code | None]
    pid: NotRequired[Pid | None]
    signal: NotRequired[Name | None]
    t: NotRequired[Time | None]


class _StatusFields(TypedDict):
    message: NotRequired[str]
    waiting: NotRequired[str]
    ranks_here: NotRequired[World | None]
    restarts: NotRequired[Count]
    start: NotRequired[StartMode]
    cold_because: NotRequired[str]
    v: NotRequired[Count | None]
    started: NotRequired[Time | None]
    ended: NotRequired[Time | None]
    supervisor: NotRequired[Who | None]
    agent: NotRequired[Who | None]
    exit_code: NotRequired[Code | None]
    detached: NotRequired[bool | None]
    agent_began: NotRequired[Time | None]
    ranks: NotRequired[Annotated[dict[str, Pid], Limits(most=RANKS, numbers=RANKS)] | None]
    failures: NotRequired[Annotated[dict[str, Failed], Limits(most=RANKS, numbers=RANKS)] | None]
    oom_kills: NotRequired[Count | None]


class Status(_StatusFields):
    """What the supervisor writes about its run."""

    state: State


class KnownStatus(_StatusFields):
    """What is known about the status of a run: nothing before the supervisor has written one."""

    state: NotRequired[State]


class Devices(TypedDict):
    """The devices that a run takes on its machine: `wanted` of those in `pool`, of one `kind` (gpu or cpu)."""

    kind: Name
    wanted: Count
    pool: Annotated[list[Name], Limits(most=RANKS)]


class Launch(TypedDict):
    """The launch plan: the command, the variables that it adds to the environment, the working directory."""

    argv: NotRequired[list[Line]]
    env: NotRequired[Annotated[dict[str, Line], Limits(most=10_000)]]
    cwd: NotRequired[Line]
    start: NotRequired[StartMode]
    cold_because: NotRequired[str]
    v: NotRequired[Count | None]
    engine: NotRequired[Name | None]
    batch_job: NotRequired[Count | None]
    limit: NotRequired[Seconds | None]
    endpoint: NotRequired[Name | None]
    ranks_here: NotRequired[World | None]
    lease: NotRequired[Devices | None]
    detached: NotRequired[bool | None]


class Capture(TypedDict):
    """A request to profile a step."""

    step: Count
    snapshot: NotRequired[bool | None]
