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
    from inshrink_core.bench import bench
    from inshrink_core.chain import Archive
    from inshrink_core.chain import verify_archive as verify
    from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
    from inshrink_core.evaluate import Evaluator
    from inshrink_core.formats import Run, write_checkpoint
    from inshrink_core.profile import sensitivity
    from inshrink_core.rehearse import rehearse
    from inshrink_core.samples import sample
    from inshrink_core.session import (
        Saver,
        compare,
        compress,
        diff,
        export,
        load_state_dict,
        pack,
        prune,
        restore,
        restore_gain,
        unpack,
        watch,
    )
    from inshrink_core.session import anatomy as anatomy
    from inshrink_core.session import estimate as estimate
    from inshrink_core.session import open_any as open
    from inshrink_core.session import search as search
    from inshrink_core.session import trajectory as trajectory

_WHERE = {
    "Archive": ("inshrink_core.chain", "Archive"),
    "Checkpoint": ("inshrink_core.checkpoint", "Checkpoint"),
    "Evaluator": ("inshrink_core.evaluate", "Evaluator"),
    "Run": ("inshrink_core.formats", "Run"),
    "Saver": ("inshrink_core.session", "Saver"),
    "TensorRole": ("inshrink_core.checkpoint", "TensorRole"),
    "TensorSpec": ("inshrink_core.checkpoint", "TensorSpec"),
    "anatomy": ("inshrink_core.session", "anatomy"),
    "bench": ("inshrink_core.bench", "bench"),
    "compare": ("inshrink_core.session", "compare"),
    "compress": ("inshrink_core.session", "compress"),
    "diff": ("inshrink_core.session", "diff"),
    "estimate": ("inshrink_core.session", "estimate"),
    "errors": ("inshrink_core.errors", None),
    "export": ("inshrink_core.session", "export"),
    "load_state_dict": ("inshrink_core.session", "load_state_dict"),
    "open": ("inshrink_core.session", "open_any"),
    "pack": ("inshrink_core.session", "pack"),
    "prune": ("inshrink_core.session", "prune"),
    "rehearse": ("inshrink_core.rehearse", "rehearse"),
    "restore": ("inshrink_core.session", "restore"),
    "restore_gain": ("inshrink_core.session", "restore_gain"),
    "sample": ("inshrink_core.samples", "sample"),
    "search": ("inshrink_core.session", "search"),
    "sensitivity": ("inshrink_core.profile", "sensitivity"),
    "trajectory": ("inshrink_core.session", "trajectory"),
    "unpack": ("inshrink_core.session", "unpack"),
    "verify": ("inshrink_core.chain", "verify_archive"),
    "watch": ("inshrink_core.session", "watch"),
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
