"""Verbs of the command line as functions, with their reports.

Registered verbs (entry points ``inshrink.verbs``) are attributes, too: `inshrink_core.verbs.bench`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.evaluate import Comparison as Comparison
    from inshrink_core.formats import write_checkpoint as write_checkpoint
    from inshrink_core.search.bounds import Bounds as Bounds
    from inshrink_core.verbs.commit import commit as commit
    from inshrink_core.verbs.compare import compare as compare
    from inshrink_core.verbs.compare import compare_archives as compare_archives
    from inshrink_core.verbs.compress import compress as compress
    from inshrink_core.verbs.estimate import estimate as estimate
    from inshrink_core.verbs.evaluate import evaluate as evaluate
    from inshrink_core.verbs.export import export as export
    from inshrink_core.verbs.inspect import inspect as inspect
    from inshrink_core.verbs.prune import prune as prune
    from inshrink_core.verbs.release import release as release
    from inshrink_core.verbs.restore import load_state_dict as load_state_dict
    from inshrink_core.verbs.restore import restore as restore
    from inshrink_core.verbs.run import run as run
    from inshrink_core.verbs.search import search as search
    from inshrink_core.verbs.sensitivity import sensitivity as sensitivity
    from inshrink_core.verbs.verify import verify as verify

__all__ = index(__name__, with_verbs=True)
