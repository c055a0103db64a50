"""The private names of torch that the probe relies on: one table, which is the only place that knows them.

Each row has the dotted name, the part of the probe that is lost without it (`LOST` says what is then not
measured), and the versions of torch that have it. The other modules of the probe use the rows. A name of which only
instances have the attribute, such as `FlatParameter._params`, is read with `of`.

For these purposes there is no public name, or it costs more: `torch.profiler` with `schedule` and `on_trace_ready`
gives the same profile as `start` and `stop`; its public `events()` takes about twenty times as long, and has no
addresses of allocations; no public function returns the flight recorder, or tells whether a profiler is active.
"""

from __future__ import annotations

import functools
import importlib
import operator
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# ---- the parts of the probe that can be lost one by one, and what is not measured without each
#
# A part is lost after its first exception, or if torch or Python lacks a name that it relies on. The `probe_error`
# event names the part, and in the second case says what is not measured.


LOST = {
    "allocator warnings": "torch's allocator prints warnings while the memory of a step is profiled",
    "bucket sizes": "the memory of DDP's buckets is not counted",
    "builds": "the compilation of C++ extensions is not shown as an activity",
    "calls of item": "calls of `.item()` between phases are not counted",
    "collectives": "traffic is not measured, and hangs are reported without their collectives",
    "compiled code": "torch.compile may trace and compile functions of the probe, which slows down the first steps",
    "compiled updates": "optimizer steps that the script compiles after it has begun to train are not found",
    "copies to the GPU": "the time of copying batches to the GPU counts as `other`",
    "data loaders": "the sizes and samplers of data loaders are not compared across ranks",
    "data loading": "the data phase is not measured, and samples are counted from the inputs of the models",
    "halves of backward": "the losses and most backward passes of zero-bubble pipelines are not measured",
    "looks": "replicas that differ, steps without effect and the like are not found",
    "loss shares": "the loss of a step with several backwards is their mean, even if the script scales them itself",
    "stores": "the store of the ranks listens on every interface, on a port that another process may take before",
    "memory curves": "profiled steps have no memory curve",
    "metrics": "values that the script reports are not recorded",
    "open records": "a profile may write to freed memory, so steps are not profiled",
    "optimizers": "the losses of several optimizers are not kept apart, and updates without hooks are not found",
    "process groups": "data that needs the process group may be missing if the script destroys it",
    "processes": "processes that the script starts are not recorded",
    "restored states": "steps that a script repeats from an earlier state are not named",
    "saved files": "paths that are passed to `torch.save` are not recorded",
    "scaled losses": "losses that pass through a gradient scaler are recorded as scaled",
    "sends": "point-to-point sends are not counted in the traffic",
    "short rendezvous": "warm starts take a few tenths of a second longer",
    "snapshots": "requested snapshots of the CUDA allocator are not written",
    "hosts": "the hosts of other nodes are not known",
    "startup": "milestones before the first step are not recorded",
    "steps": "steps, phases and losses are incomplete or missing",
    "tensors": "gradients and parameters are not stored, so the equivalence of runs is not judged",
    "timelines": "steps are not profiled, so there are no timelines, exposed communication or memory curves",
    "traces": "memory and traffic are predicted by formulas only, and those of your own scripts are not",
    "tensor versions": "changes of tensors are not counted, so some updates without hooks are not found",
    "weights of losses": "losses that are means over different numbers of elements are not found",
    "warm starts": "runs start cold",
}


class MissingName(AttributeError):
    """torch or Python has no such name; `part` of the probe is lost."""

    def __init__(self, name: str, part: str):
        library = name.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        owner = f"{library} {version}" if version else f"Python {platform.python_version()}"
        super().__init__(f"{owner} has no {name}: {LOST[part]}")
        self.part = part


def find(name: str, part: str) -> Any:
    """The object with a dotted name; imports modules that are not loaded yet. Raises `MissingName`."""
    path, *rest = name.split(".")
    found = importlib.import_module(path)
    for attribute in rest:
        path = f"{path}.{attribute}"
        if path in sys.modules:  # torch.distributed.rendezvous is also a function
            found = sys.modules[path]
        elif hasattr(found, attribute):
            found = getattr(found, attribute)
        else:
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise MissingName(name, part) from None
    return found


_OLDEST = "2.6"
_find = functools.cache(find)


@dataclass(frozen=True)
class Private:
    """A private name of torch, the part of the probe that is lost without it, and the first and last version that has
    it (last: empty if the newest does).
    """

    name: str
    part: str
    since: str = _OLDEST
    until: str = ""

    @functools.cached_property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    @functools.cached_property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    def get(self) -> Any:
        """The object. Raises `MissingName`."""
        return _find(self.name, self.part)

    def exists(self) -> bool:
        try:
            self.get()
        except MissingName:
            return False
        return True

    def replace(self, replacement: Any) -> None:
        """Puts another object in its place. Raises `MissingName`."""
        setattr(_find(self.owner, self.part), self.attribute, replacement)

    def of(self, owner: Any) -> Any:
        """The attribute of an instance. Raises `MissingName`."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError:
            raise MissingName(self.name, self.part) from None

    def reader(self, otherwise: Any) -> Callable[[Any], Any]:
        """A function that reads the attribute of an instance at the speed of C; without the name it returns
        `otherwise`.
        """
        return operator.attrgetter(self.attribute) if self.exists() else lambda owner: otherwise


_NODE = "torch.autograd.graph.Node"
_FLAT = "torch.distributed.fsdp._flat_param.FlatParameter"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.SubprocessHandler"
_FRAMES = "torch._C._dynamo.eval_frame"
_KINETO = "torch._C._autograd._ProfilerResult"

# ---- steps and losses
NEXT_BATCH = Private("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", "data loading")
TENSOR_VERSION = Private("torch.Tensor._version", "tensor versions")
COMPILE_COUNTERS = Private("torch._dynamo.utils.counters", "compiled updates")
SAVED_OTHER = Private(f"{_NODE}._saved_other", "loss shares")  # of DivBackward0 and MulBackward0
SAVED_SELF = Private(f"{_NODE}._saved_self", "loss shares")  # of MulBackward0
SAVED_REDUCTION = Private(f"{_NODE}._saved_reduction", "loss shares")  # of losses
SAVED_COUNT = Private(f"{_NODE}._saved_self_sym_numel", "weights of losses")  # of MeanBackward0
SAVED_TOTAL = Private(f"{_NODE}._saved_total_weight", "weights of losses")  # of NllLossBackward0
DDP_SINK = Private("torch.nn.parallel.distributed._DDPSink", "loss shares")

# ---- torch.compile
SET_EVAL_FRAME = Private(f"{_FRAMES}.set_eval_frame", "compiled code")
SKIP_CODE = Private(f"{_FRAMES}.skip_code", "compiled code", until="2.6")
SET_STRATEGY = Private(f"{_FRAMES}.set_code_exec_strategy", "compiled code", since="2.7")
STRATEGY = Private(f"{_FRAMES}._FrameExecStrategy", "compiled code", since="2.7")
ACTION = Private(f"{_FRAMES}._FrameAction", "compiled code", since="2.7")

# ---- profiled steps and memory
PROFILER_ENABLED = Private("torch.autograd._profiler_enabled", "timelines")
KINETO_RESULTS = Private("torch.autograd.profiler.profile.kineto_results", "timelines")  # of an instance
KINETO_EVENTS = Private(f"{_KINETO}.events", "timelines")
KINETO_TREE = Private(f"{_KINETO}.experimental_event_tree", "memory curves")
EVENT_TYPE = Private("torch._C._profiler._EventType", "memory curves")
LOG_LEVEL = Private("torch.lib.libc10.FLAGS_caffe2_log_level", "allocator warnings")  # of a C library
RECORD_HISTORY = Private("torch.cuda.memory._record_memory_history", "snapshots")
DUMP_SNAPSHOT = Private("torch.cuda.memory._dump_snapshot", "snapshots")
DDP_LOGGING = Private("torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data", "bucket sizes")

# ---- process groups
FLIGHT_RECORDER = Private("torch._C._distributed_c10d._dump_fr_trace_json", "collectives", since="2.8")
NCCL_RECORDER = Private("torch._C._distributed_c10d._dump_nccl_trace_json", "collectives")  # if torch has NCCL
WORLD = Private("torch.distributed.distributed_c10d._world", "collectives")
SEQUENCE_NUMBER = Private("torch.distributed.ProcessGroup._get_sequence_number_for_group", "looks")

# ---- stored gradients and parameters
FSDP_HANDLE = Private("torch.distributed.fsdp.FullyShardedDataParallel._handle", "tensors")  # of an instance
FLAT_TENSORS = Private(f"{_FLAT}._params", "tensors")
FLAT_INFOS = Private(f"{_FLAT}._param_infos", "tensors")
FLAT_SHAPES = Private(f"{_FLAT}._shapes", "tensors")
FLAT_SHARDS = Private(f"{_FLAT}._shard_param_infos", "tensors")
SHARD_OFFSET = Private("torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "tensors")

# ---- the warm server
START_PROCESS = Private(f"{_HANDLER}._popen", "warm starts")
STDOUT = Private(f"{_HANDLER}._stdout", "warm starts")  # of an instance
STDERR = Private(f"{_HANDLER}._stderr", "warm starts")
CALLER = Private("torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name", "short rendezvous")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Private))

# names that recorded values contain, none of which is looked up: what torch's wrappers add to the name of a parameter,
# and the package whose processes compile kernels
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
COMPILER = "torch._inductor"
