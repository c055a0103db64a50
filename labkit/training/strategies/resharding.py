"""Checkpoints of other strategies: a whole model from shards, and shards from a whole model.

Both layouts name tensors as the whole model does, so that any number of ranks can read either.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.futures import Future

# The classes in the index of the shards; torch.load rejects every other class.
INDEX = [
    filesystem._StorageInfo,
    metadata._MEM_FORMAT_ENCODING,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
]
OPTIMIZER = "optimizer.state."  # precedes the name of a parameter, and that of its state


class ShardReader(dcp.FileSystemReader):
    """Reads shards without unpickling code; torch's own reader unpickles `.metadata`."""

    def read_metadata(self, **kwargs) -> metadata.Metadata:
        with torch.serialization.safe_globals(INDEX):
            index = torch.load(self.path / "index.pt", weights_only=True)
        files = {path.name for path in self.path.iterdir()}
        for shard in index.storage_data.values():
            if shard.relative_path not in files:
                raise ValueError(f"the index names {shard.relative_path}, which is not in {self.path}")
        return index


class WholeReader(dcp.FileSystemReader):
    """Reads the shards of this rank from the checkpoint of a whole model."""

    def read_metadata(self, **kwargs) -> metadata.Metadata:
        settings = {"map_location": "cpu", "mmap": True}  # read only what is used
        state = torch.load(self.path / "state.pt", **settings, weights_only=True)
        self.tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        for number, values in state["optimizer"]["state"].items():
            prefix = f"{OPTIMIZER}{state['names'][number]}."
            self.tensors |= {prefix + key: value for key, value in values.items()}
        index = {}
        for name, tensor in self.tensors.items():
            kind = metadata.TensorProperties.create_from_tensor(tensor)
            whole = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())
            index[name] = metadata.TensorStorageMetadata(kind, tensor.size(), [whole])
        return metadata.Metadata(index, storage_data={})

    def read_data(self, plan, planner) -> Future:
        for item in plan.items:
            part = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            planner.commit_tensor(item, target.copy_(part))
        finished = Future()
        finished.set_result(None)
        return finished


def whole_from_shards(path: Path, model, optimizer) -> dict:
    """The state that a checkpoint in shards contains, as `save` writes it for a whole
    model."""
    reader, names = ShardReader(path), [name for name, _ in model.named_parameters()]
    kinds = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in kinds.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    group = {**optimizer.param_groups[0], "params": [*range(len(names))]}
    state = {"model": {}, "optimizer": {"state": {n: {} for n in group["params"]}, "param_groups": [group]}}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            state["optimizer"]["state"][names.index(parameter)][key] = tensor
        else:
            state["model"][name.removeprefix("model.")] = tensor
    return state | torch.load(path / "progress.pt", weights_only=True)
