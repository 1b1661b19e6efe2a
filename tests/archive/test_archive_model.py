"""The archive against a dictionary, through appends, branches, crashes, removals and reopenings."""

from hypothesis import HealthCheck, settings

from inshrink_core.testing.archives import ArchiveMachine

TestArchive = ArchiveMachine.TestCase
TestArchive.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
