"""Command line `inshrink`, derived from the requests of the verbs.

This module imports only the standard library, because the working directory must leave the import path first.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    arguments
        Words after the program's name; by default those of this process.

    Returns
    -------
    int
        0 done, 1 a check failed, 2 the user's input, 3 damaged data, 70 a bug, 130 interrupted,
        141 the reader of the output closed it.
    """
    from inshrink_core.cli.surroundings import leave_working_directory

    leave_working_directory()
    from inshrink_core.cli import application

    return application.main(arguments)
