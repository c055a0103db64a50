"""The private names of torch that the probe relies on: one table, which is the only place that knows them.

Each row has the dotted name, the part of the probe that is lost without it (`parts.LOST` says what is then not
measured), and the versions of torch that have it. The other modules of the probe use the rows. A name of which only
instances have the attribute, such as `FlatParameter._params`, is read with `of`.

For these purposes there is no public name, or it costs more: `torch.profiler` with `schedule` and `on_trace_ready`
gives the same profile as `start` and `stop`; its public `events()` takes about twenty times as long, and has no
addresses of allocations; no public function returns the flight recorder, or tells whether a profiler is active.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.probe.parts import MissingName, find

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
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @functools.cached_property
    def owner(self) -> str:
        """The name of the module or class that has it."""
        return self.name.rpartition(".")[0]

    def get(self) -> Any:
        """The object. Raises `MissingName`."""
        return _find(self.name, self.part)

    def exists(self) -> bool:
        """Whether this torch has it."""
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
