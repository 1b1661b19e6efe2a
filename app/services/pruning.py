"""Pruning archives as jobs: a plan first, then the deed with the same rules."""

from __future__ import annotations

from typing import Any, NamedTuple

from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import Chain
from inshrink_app.services import running
from inshrink_app.services.history import load_json

__all__ = ["PruneRules", "prune_done", "prune_job", "prune_plan", "start_prune"]


class PruneRules(NamedTuple):
    """What stays. The last step of each branch, and where its training was restored from, always do."""

    keep_every: int | None = None
    keep_last: int | None = None
    keep: tuple[int, ...] = ()
    drop_branches: bool = False
    smallest: bool = False

    @property
    def says_something(self) -> bool:
        """Whether any rule says what to keep."""
        return bool(self.keep_every or self.keep_last or self.keep)


def _state(chain: Chain) -> list[str]:
    """Return what changes with every commit: a plan is for one state of an archive."""
    return [str(chain.path), str(len(chain.frames)), chain.frames[-1].digest if chain.frames else ""]


def prune_plan(chain: Chain, rules: PruneRules) -> Job | None:
    """Return the dry run of these rules on the archive as it is, if there was one."""
    return running.jobs().get(("plan", *_state(chain), *map(str, rules)), load_json)


def prune_done(chain: Chain) -> Job | None:
    """Return the last pruning of this archive, as far as it is known."""
    return running.jobs().get(("prune", str(chain.path)), load_json)


def prune_job(chain: Chain, rules: PruneRules) -> Job | None:
    """Return the pruning or planning that is at work on this archive."""
    for job in (prune_done(chain), prune_plan(chain, rules)):
        if job is not None and job.is_running:
            return job
    return None


def start_prune(chain: Chain, rules: PruneRules, *, dry_run: bool) -> Job:
    """Prune, or tell what pruning would do."""
    request: dict[str, Any] = {"task": "prune", "path": str(chain.path), "dry_run": dry_run}
    request |= rules._asdict() | {"keep": list(rules.keep)}
    key = ("plan", *_state(chain), *map(str, rules)) if dry_run else ("prune", str(chain.path))
    return running.jobs().start(key, request, load_json, again=not dry_run)
