"""A verb as another package would register it."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from inshrink_core.report import Report
from inshrink_core.request import Request


@dataclass(frozen=True)
class PetReport(Report):
    """Who was petted."""

    name: str


@dataclass(frozen=True)
class Pet(Request[PetReport]):
    """Pet somebody.

    Parameters
    ----------
    name
        Whom.
    """

    _: KW_ONLY
    name: str = ""

    EXAMPLES: ClassVar = ("inshrink pet --name Rex",)
    INTERRUPTED: ClassVar = "nobody was petted"

    def perform(self):
        """Pet them."""
        if not self.name:
            raise KeyboardInterrupt
        return PetReport(self.name)


def stray():
    """Be no verb."""
