"""The failure rehearsal: training that fails and goes on from the archive, against training that does not."""

from inshrink_core.rehearse.rehearsal import rehearse
from inshrink_core.rehearse.report import Rehearsal, TrainingResult

__all__ = ["Rehearsal", "TrainingResult", "rehearse"]
