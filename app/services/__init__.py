"""What the pages ask: the only part of the explorer that imports the engine, and the only that caches.

The engine is imported inside the functions, so that the first page does not wait for it. What comes back
are the plain values of `tables`; what goes wrong is a `ServiceError` that a page can show. Long work
happens in another process (`inshrink_app.jobs.worker`).
"""

from inshrink_app.jobs.registry import MOST_AT_WORK
from inshrink_app.pages.archive.tables import Verdict
from inshrink_app.services.ahead import warm_up
from inshrink_app.services.archives import archives_of, chain_of, original_of
from inshrink_app.services.comparing import (
    EvaluatorCode,
    compare_job,
    compared,
    evaluator_of,
    given_evaluator,
    newest_comparison,
    start_compare,
)
from inshrink_app.services.differing import diff_cost, moved_between, other_runs
from inshrink_app.services.drilldown import (
    ARCHIVE,
    course,
    course_steps,
    drill_cost,
    drill_down,
    stored_ways,
)
from inshrink_app.services.estimating import (
    check_config,
    codec_settings,
    default_optimizer,
    estimated,
    unmatched_overrides,
)
from inshrink_app.services.exporting import (
    download_url,
    export_target,
    newest_export,
    start_export,
    start_pack,
    suggested_name,
)
from inshrink_app.services.history import (
    JobText,
    all_jobs,
    describe,
    find_job,
    forget_job,
    linked_job,
    place_in_queue,
    read_result,
    resume_job,
    stop_job,
)
from inshrink_app.services.measuring import (
    cancel_sensitivity,
    forget_sensitivity,
    measuring_cost,
    sensitivity_job,
    start_sensitivity,
    told_metrics,
)
from inshrink_app.services.opening import Sample, load_subject, refresh, remember, resolve, samples
from inshrink_app.services.planning import export_plan, start_trial, trial_job
from inshrink_app.services.pruning import PruneRules, prune_done, prune_job, prune_plan, start_prune
from inshrink_app.services.rehearsing import (
    Training,
    finished_rehearsals,
    rehearsal,
    rehearsal_job,
    rehearsal_so_far,
    start_rehearsal,
    training_named,
    training_of,
    trainings,
)
from inshrink_app.services.restoring import (
    newest_restore,
    restore_target,
    restored,
    start_restore,
    suggested_folder,
)
from inshrink_app.services.saved_rehearsals import saved_rehearsals
from inshrink_app.services.searching import (
    BASELINE_NAMES,
    baselines,
    baselines_job,
    estimates,
    estimates_job,
    newest_search,
    searched,
    start_baselines,
    start_estimates,
    start_search,
)
from inshrink_app.services.verifying import start_errors, start_verify, verdict, verify_job

__all__ = [
    "ARCHIVE",
    "BASELINE_NAMES",
    "MOST_AT_WORK",
    "EvaluatorCode",
    "JobText",
    "PruneRules",
    "Sample",
    "Training",
    "Verdict",
    "all_jobs",
    "archives_of",
    "baselines",
    "baselines_job",
    "cancel_sensitivity",
    "chain_of",
    "check_config",
    "codec_settings",
    "compare_job",
    "compared",
    "course",
    "course_steps",
    "default_optimizer",
    "describe",
    "diff_cost",
    "download_url",
    "drill_cost",
    "drill_down",
    "estimated",
    "estimates",
    "estimates_job",
    "evaluator_of",
    "export_plan",
    "export_target",
    "find_job",
    "finished_rehearsals",
    "forget_job",
    "forget_sensitivity",
    "given_evaluator",
    "linked_job",
    "load_subject",
    "measuring_cost",
    "moved_between",
    "newest_comparison",
    "newest_export",
    "newest_restore",
    "newest_search",
    "original_of",
    "other_runs",
    "place_in_queue",
    "prune_done",
    "prune_job",
    "prune_plan",
    "read_result",
    "refresh",
    "rehearsal",
    "rehearsal_job",
    "rehearsal_so_far",
    "remember",
    "resolve",
    "restore_target",
    "restored",
    "resume_job",
    "samples",
    "saved_rehearsals",
    "searched",
    "sensitivity_job",
    "start_baselines",
    "start_compare",
    "start_errors",
    "start_estimates",
    "start_export",
    "start_pack",
    "start_prune",
    "start_rehearsal",
    "start_restore",
    "start_search",
    "start_sensitivity",
    "start_trial",
    "start_verify",
    "stop_job",
    "stored_ways",
    "suggested_folder",
    "suggested_name",
    "told_metrics",
    "training_named",
    "training_of",
    "trainings",
    "trial_job",
    "unmatched_overrides",
    "verdict",
    "verify_job",
    "warm_up",
]
