"""Inshrink: training runs as compressed, verifiable chains of deltas.

The public index. Names load on first use (PEP 562), so that importing the package, `inshrink --help`
and `inshrink inspect` never import torch.

Examples
--------
>>> import inshrink_core
>>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
>>> run[400]["conv1.weight"].shape
torch.Size([16, 1, 3, 3])
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inshrink_core import errors
    from inshrink_core.analysis.anatomy import anatomy as anatomy
    from inshrink_core.analysis.gain import restore_gain
    from inshrink_core.analysis.profile import sensitivity
    from inshrink_core.analysis.trajectory import trajectory as trajectory
    from inshrink_core.bench import bench
    from inshrink_core.chain import Archive
    from inshrink_core.chain import verify_archive as verify
    from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
    from inshrink_core.evaluate import Evaluator
    from inshrink_core.formats import Run, write_checkpoint
    from inshrink_core.samples import sample
    from inshrink_core.search.search import search
    from inshrink_core.training.rehearsal import rehearse
    from inshrink_core.training.saver import Saver
    from inshrink_core.verbs.compare import compare
    from inshrink_core.verbs.compress import compress
    from inshrink_core.verbs.diff import diff
    from inshrink_core.verbs.estimate import estimate
    from inshrink_core.verbs.export import export
    from inshrink_core.verbs.pack import pack, unpack
    from inshrink_core.verbs.prune import prune
    from inshrink_core.verbs.restore import load_state_dict, restore
    from inshrink_core.verbs.restore import open_any as open
    from inshrink_core.verbs.watch import watch

_WHERE = {
    "Archive": ("inshrink_core.chain", "Archive"),
    "Checkpoint": ("inshrink_core.checkpoint", "Checkpoint"),
    "Evaluator": ("inshrink_core.evaluate", "Evaluator"),
    "Run": ("inshrink_core.formats", "Run"),
    "Saver": ("inshrink_core.training.saver", "Saver"),
    "TensorRole": ("inshrink_core.checkpoint", "TensorRole"),
    "TensorSpec": ("inshrink_core.checkpoint", "TensorSpec"),
    "anatomy": ("inshrink_core.analysis.anatomy", "anatomy"),
    "bench": ("inshrink_core.bench", "bench"),
    "compare": ("inshrink_core.verbs.compare", "compare"),
    "compress": ("inshrink_core.verbs.compress", "compress"),
    "diff": ("inshrink_core.verbs.diff", "diff"),
    "estimate": ("inshrink_core.verbs.estimate", "estimate"),
    "errors": ("inshrink_core.errors", None),
    "export": ("inshrink_core.verbs.export", "export"),
    "load_state_dict": ("inshrink_core.verbs.restore", "load_state_dict"),
    "open": ("inshrink_core.verbs.restore", "open_any"),
    "pack": ("inshrink_core.verbs.pack", "pack"),
    "prune": ("inshrink_core.verbs.prune", "prune"),
    "rehearse": ("inshrink_core.training.rehearsal", "rehearse"),
    "restore": ("inshrink_core.verbs.restore", "restore"),
    "restore_gain": ("inshrink_core.analysis.gain", "restore_gain"),
    "sample": ("inshrink_core.samples", "sample"),
    "search": ("inshrink_core.search.search", "search"),
    "sensitivity": ("inshrink_core.analysis.profile", "sensitivity"),
    "trajectory": ("inshrink_core.analysis.trajectory", "trajectory"),
    "unpack": ("inshrink_core.verbs.pack", "unpack"),
    "verify": ("inshrink_core.chain", "verify_archive"),
    "watch": ("inshrink_core.verbs.watch", "watch"),
    "write_checkpoint": ("inshrink_core.formats", "write_checkpoint"),
}

__all__ = [
    "Archive",
    "Checkpoint",
    "Evaluator",
    "Run",
    "Saver",
    "TensorRole",
    "TensorSpec",
    "anatomy",
    "bench",
    "compare",
    "compress",
    "diff",
    "errors",
    "estimate",
    "export",
    "load_state_dict",
    "open",
    "pack",
    "prune",
    "rehearse",
    "restore",
    "restore_gain",
    "sample",
    "search",
    "sensitivity",
    "trajectory",
    "unpack",
    "verify",
    "watch",
    "write_checkpoint",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'inshrink_core' has no attribute '{name}'")
    module, attribute = _WHERE[name]
    loaded = import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)


class _Index(ModuleType):
    """The package itself: a submodule does not hide the public name it shares.

    Importing the stage `inshrink_core.sensitivity` would make it the attribute ``sensitivity`` of the
    package, in place of the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _WHERE.get(name, ("", None))[1] is not None:
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Index
