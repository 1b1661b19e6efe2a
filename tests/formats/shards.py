"""Distributed checkpoints of several ranks, written by one process with PyTorch's own planner and writer."""

import pickle
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Shard = tuple[int, Sequence[int], Tensor]
"""Rank, first index in each dimension, values."""


class _Planner(DefaultSavePlanner):
    def __init__(self, values):
        super().__init__()
        self._values = values

    def resolve_data(self, write_item):
        return self._values[write_item.index.fqn, tuple(write_item.index.offset)]


def _item(name, shape, offsets, values):
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), values.shape),
        properties=TensorProperties.create_from_tensor(values),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def save_shards(folder, tensors, paths=None):
    """Write tensors by name, each with the shape of the whole and its shards, as so many ranks would."""
    values = {
        (name, tuple(offsets)): part for name, (_, shards) in tensors.items() for _, offsets, part in shards
    }
    n_ranks = 1 + max(rank for _, shards in tensors.values() for rank, *_ in shards)
    plans = [
        SavePlan(
            [
                _item(name, shape, offsets, part)
                for name, (shape, shards) in tensors.items()
                for owner, offsets, part in shards
                if owner == rank
            ]
        )
        for rank in range(n_ranks)
    ]
    plans, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = dict(paths or {})
    writers = [FileSystemWriter(folder) for _ in plans]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0)
    plans = writers[0].prepare_global_plan(
        [writer.prepare_local_plan(plan) for writer, plan in zip(writers, plans, strict=True)]
    )
    planner = _Planner(values)
    results = [writer.write_data(plan, planner).wait() for writer, plan in zip(writers, plans, strict=True)]
    writers[0].finish(metadata, results)
    return folder


def edited(folder):
    """Return what ``.metadata`` says, to be changed and written again by `rewrite`."""
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def stored(metadata, name, which=0):
    """Return the place of one shard of a tensor."""
    return [info for index, info in metadata.storage_data.items() if index.fqn == name][which]
