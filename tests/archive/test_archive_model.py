"""The archive against a dictionary, through appends, branches, crashes, removals and reopenings."""

from unittest import mock

from hypothesis import HealthCheck, settings

from inshrink_core.testing.archives import ArchiveMachine


class Crowded(ArchiveMachine):
    """An archive that writes small files together from the third on, in groups of up to three."""

    def __init__(self) -> None:
        super().__init__()
        self._patched = mock.patch.multiple(
            "inshrink_core.archive.writer", MAX_SMALL_FILES=2, _GROUP_FRAMES=3
        )
        self._patched.start()

    def teardown(self) -> None:
        self._patched.stop()
        super().teardown()


TestArchive = ArchiveMachine.TestCase
TestCrowdedArchive = Crowded.TestCase
TestArchive.settings = TestCrowdedArchive.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
