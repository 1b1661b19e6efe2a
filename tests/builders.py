"""Small checkpoints and runs in memory, for tests of what stands above the formats, and damage to files."""

import torch

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.evaluate import Evaluation
from inshrink_core.metrics import Direction


class DictSource:
    """A tensor source that reads from a dict by key, and remembers what was read."""

    def __init__(self, tensors):
        self.tensors, self.reads = dict(tensors), []

    def read(self, spec):
        self.reads.append(spec.key)
        return self.tensors[spec.key].contiguous().clone()

    def skeleton(self, layout):
        return b""


def spec_of(key, tensor):
    """Return the spec of a key ``name`` or ``name@role``; running statistics are buffers."""
    name, _, role = key.partition("@")
    if not role:
        buffer = name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        role = "buffer" if buffer else "weight"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, role=TensorRole(role), dtype=dtype, shape=tuple(tensor.shape))


def memory_checkpoint(step, tensors, hyperparameters=None):
    """Return a checkpoint of tensors by key."""
    specs = tuple(spec_of(key, tensor) for key, tensor in tensors.items())
    return Checkpoint(
        step=step, specs=specs, source=DictSource(tensors), hyperparameters=hyperparameters or {}
    )


class MemoryRun:
    """A run in memory; with a directory it has identities, and so a cache."""

    def __init__(self, checkpoints, directory=None):
        self.checkpoints = dict(checkpoints)
        self.identities = {step: f"identity of {step}" for step in checkpoints}
        if directory is not None:
            self.directory = directory
            self.identity = self.identities.__getitem__

    @property
    def steps(self):
        return tuple(sorted(self.checkpoints))

    def __getitem__(self, step):
        return self.checkpoints[step]

    def reads(self):
        """Return how many tensors were read so far."""
        return sum(len(checkpoint.source.reads) for checkpoint in self.checkpoints.values())


def memory_run(tensors_by_step, *, hyperparameters=None, directory=None):
    """Return a run of tensors by step and key."""
    checkpoints = {
        step: memory_checkpoint(step, tensors, hyperparameters) for step, tensors in tensors_by_step.items()
    }
    return MemoryRun(checkpoints, directory)


def flip(path, at=None, bit=0):
    """Flip a bit of a file: of the byte in its middle, unless another is named."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    path.write_bytes(content)


def seeded(shape, seed, dtype=torch.float32):
    """Return normal values that are the same whenever asked."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def evaluation(value=1.0, metric="loss", *, error=None, **arrays):
    """Return what an evaluator finds by a metric of which less is better."""
    errors = {} if error is None else {metric: error}
    found = {"metric": metric, "value": value, "metrics": {metric: value}, "standard_errors": errors}
    return Evaluation(direction=Direction.LOWER, **found, **arrays)
