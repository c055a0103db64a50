"""The private names of torch that a trace relies on: one table, which is the only place that knows them, as
`labkit/probe/torch_private.py` is for the probe.

Without a name of the first part there is no trace: strategies are predicted by formula, and the reason names it. Names
of the second part are used if torch has them. Public names that this package replaces are in `world.py` and
`own_script.py`.
"""

from __future__ import annotations

from labkit.probe.torch_private import Private

_PART = "traces"
_FAKE = "torch._subclasses.fake_tensor"
_DISPATCH, _TREE = "torch.utils._python_dispatch", "torch.utils._pytree"
_OPS, _GROUPS = "torch.ops", "torch.distributed.distributed_c10d"

# ---- tensors without data, and the operations on them
FAKE_MODE = Private(f"{_FAKE}.FakeTensorMode", _PART)
FAKE_TENSOR = Private(f"{_FAKE}.FakeTensor", _PART)
NO_VALUES = Private(f"{_FAKE}.DataDependentOutputException", _PART)
NO_SHAPE = Private(f"{_FAKE}.DynamicOutputShapeException", _PART)
NO_KERNEL = Private(f"{_FAKE}.UnsupportedOperatorException", _PART)
DISPATCH_MODE = Private(f"{_DISPATCH}.TorchDispatchMode", _PART)
WITHOUT_MODES = Private(f"{_DISPATCH}._disable_current_modes", _PART)
TREE_ITER = Private(f"{_TREE}.tree_iter", _PART)
TREE_MAP = Private(f"{_TREE}.tree_map_only", _PART)
READ_NUMBER = Private(f"{_OPS}.aten._local_scalar_dense.default", _PART)
MODULE_APPLY = Private("torch.nn.Module._apply", _PART)
GRAPH_TASK = Private("torch._C._current_graph_task_id", _PART)
ALL_TRUE = Private("torch._is_all_true", _PART)
ENGINE = Private("torch.autograd.Variable._execution_engine", _PART)
FOREACH = Private("torch.optim.optimizer._default_to_fused_or_foreach", _PART)
SCALER_STEP = Private("torch.amp.GradScaler._maybe_opt_step", _PART)
DEVICE_CONTEXT = Private("torch.utils._device.DeviceContext", _PART)

# ---- process groups and buckets
FAKE_STORE = Private("torch.testing._internal.distributed.fake_pg.FakeStore", _PART)
WORLD = Private(f"{_GROUPS}._world", _PART)
GROUP_OF = Private(f"{_GROUPS}._resolve_process_group", _PART)
WAIT = Private(f"{_OPS}._c10d_functional.wait_tensor.default", _PART)
BUCKETS = Private("torch.distributed._compute_bucket_assignment_by_size", _PART)
FIRST_BUCKET = Private("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", _PART)
FIND_TENSORS = Private("torch.nn.parallel.distributed._find_tensors", _PART)

COALESCED = Private("torch._utils._take_tensors", _PART)
FLAT = Private("torch._utils._flatten_dense_tensors", _PART)

REQUIRED = tuple(value for value in list(globals().values()) if isinstance(value, Private))

SCHEMA = Private("torch._ops.OpOverload._schema", _PART)  # of an instance

# ---- what some versions compute with tensors, or for each rank
GLOBAL_SHAPES = Private(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached", _PART
)
STRIDED_SIZES = Private("torch.distributed.tensor.placement_types._StridedShard.local_shard_size_and_offset", _PART)
CHUNKS = Private("torch.distributed.fsdp._fully_shard._fsdp_common._chunk_with_empty", _PART)

# ---- how pipeline stages learn whether all of them know the shapes of their inputs and outputs
STAGES_AGREE = Private("torch.distributed.pipelining.stage.PipelineStage._warmup_backward_result", _PART)
NEEDS_SHAPES = Private("torch.distributed.pipelining.stage.InferenceMode.needs_dynamic", _PART)
GIVEN_SHAPES = Private("torch.distributed.pipelining.stage.PipelineStage._user_meta", _PART)  # of an instance

# ---- whether a tensor has memory, by its address
IS_ALLOCATED = Private("torch.distributed.utils._data_ptr_allocated", _PART)

OPTIONAL = GLOBAL_SHAPES, STRIDED_SIZES, CHUNKS, STAGES_AGREE, NEEDS_SHAPES, IS_ALLOCATED


def check() -> None:
    """Raises `MissingName` if this torch lacks a name without which there is no trace."""
    for name in REQUIRED:
        name.get()
