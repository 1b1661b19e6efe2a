"""The lab: experiments that validate the product.

It has published codecs for comparison, benchmarks of all codecs, rehearsals of failing trainings with their
tasks, and averages of steps. The lab uses the core like any other package and registers its codecs, tasks and
verbs as entry points. No other package imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_lab.average import average as average
    from inshrink_lab.bench.benchmark import bench as bench
    from inshrink_lab.rehearsal import rehearse as rehearse
    from inshrink_lab.tasks.task import Task as Task
    from inshrink_lab.tasks.task import find_task as find_task
    from inshrink_lab.tasks.task import task_names as task_names

__all__ = index(__name__)
