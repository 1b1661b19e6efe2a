"""Inshrink: training runs as compressed, verifiable chains of deltas.

The package exports the most used names. Public modules hold the rest: `inshrink_core.verbs` (all verbs of the
command line), `inshrink_core.analysis`, `inshrink_core.training`, `inshrink_core.evaluate`,
`inshrink_core.codec` and `inshrink_core.errors`. Names load on first use, so that importing the package,
`inshrink --help` and `inshrink inspect` never import torch.

Examples
--------
>>> import inshrink_core
>>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
>>> run[400]["conv1.weight"].shape
torch.Size([16, 1, 3, 3])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core import analysis as analysis
    from inshrink_core import codecs as codecs
    from inshrink_core import errors as errors
    from inshrink_core import evaluate as evaluate
    from inshrink_core import training as training
    from inshrink_core import verbs as verbs
    from inshrink_core.chain import Archive as Archive
    from inshrink_core.chain.archive import open_any as open
    from inshrink_core.checkpoint import Checkpoint as Checkpoint
    from inshrink_core.formats import Run as Run
    from inshrink_core.samples import sample as sample
    from inshrink_core.training.saver import Saver as Saver
    from inshrink_core.verbs.compare import compare as compare
    from inshrink_core.verbs.compress import compress as compress
    from inshrink_core.verbs.restore import restore as restore
    from inshrink_core.verbs.search import search as search
    from inshrink_core.verbs.verify import verify as verify

__version__ = "0.1.0"

__all__ = index(__name__)
