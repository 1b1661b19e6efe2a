"""What the engine and the file system raise, as problems that a page can show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inshrink_app.widgets.tables import Problem, ServiceError

__all__ = ["reported"]


@contextmanager
def reported() -> Iterator[None]:
    """Turn what the engine and the file system raise into a `ServiceError`."""
    from inshrink_core.errors import InshrinkError
    from inshrink_core.formats import NoCheckpointError

    try:
        yield
    except NoCheckpointError as error:
        detail = "\n".join(f"{row.path}: {row.reason}" for row in error.skipped)
        remedy = "choose a folder of .pt, .pth, .bin, .ckpt or .safetensors files, or of checkpoint folders"
        raise ServiceError(Problem("no readable checkpoint in here", error.where, remedy, detail)) from error
    except InshrinkError as error:
        detail = f"expected {error.expected}, found {error.found}" if error.expected or error.found else ""
        raise ServiceError(Problem(error.what, error.where, error.remedy, detail)) from error
    except OSError as error:
        problem = Problem(
            f"the file system refused: {error.strerror or error}",
            str(error.filename or ""),
            "check that the folder exists and that you may read it",
        )
        raise ServiceError(problem) from error
