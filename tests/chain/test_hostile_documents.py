"""Documents that say anything, under checksums that are right: refused in Inshrink's own words, or read."""

import random

from benchmarks.fuzz.archive_target import ArchiveTarget
from inshrink_core.errors import InshrinkError

CASES = 40


def test_hostile_documents_raise_typed_errors_alone_and_what_verifies_restores():
    target = ArchiveTarget("archive", sealed=True)
    outcomes = set()
    for number in range(CASES):
        try:
            outcomes.add(target.execute(target.mutate(random.Random(f"tests/{number}"))))
        except InshrinkError:  # more memory than there is, which the error says
            outcomes.add("refused")
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
    assert {"refused", "different"} <= outcomes
