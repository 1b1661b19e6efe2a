"""The archive against a dictionary, through appends, branches, crashes, removals and reopenings."""

from unittest import mock

from hypothesis import HealthCheck, settings

from inshrink_core.archive import ArchiveWriter
from inshrink_core.testing.archives import ArchiveMachine
from tests.archive.conftest import begin_in_parts


class Crowded(ArchiveMachine):
    """An archive that writes small files together from the third on, in groups of up to three."""

    def __init__(self):
        super().__init__()
        self._patched = mock.patch.multiple(
            "inshrink_core.archive.segment", MAX_SMALL_FILES=2, GROUP_FRAMES=3
        )
        self._patched.start()

    def teardown(self):
        self._patched.stop()
        super().teardown()


class Parted(Crowded):
    """An archive of frames in three parts, opened and committed to as any other."""

    def __init__(self):
        super().__init__()
        self._in_parts = mock.patch.object(ArchiveWriter, "begin", begin_in_parts)
        self._in_parts.start()

    def teardown(self):
        self._in_parts.stop()
        super().teardown()


TestArchive = ArchiveMachine.TestCase
TestCrowdedArchive = Crowded.TestCase
TestArchiveInParts = Parted.TestCase
TestArchive.settings = TestCrowdedArchive.settings = TestArchiveInParts.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
