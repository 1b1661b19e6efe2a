"""Bundled sample runs: their location, and trust in their evaluators.

Code of a run is executed only with the user's consent. A bundled sample is trusted by the digest of its code
and of the files that this reads, never by its path.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from inshrink_core.errors import NotFoundError

_PACKAGE = "inshrink_samples"

TRUSTED_FILES = ("evaluator.py", "inshrink.toml", "digits-validation.npz")
"""Files of a sample's evaluator, in the order of the digest."""

TRUSTED_DIGESTS = frozenset({"168f8811ffafad6d66f76c0ff26486b217095eb2971f029d94c9f662d6c4424a"})
"""`evaluator_digest` of every bundled sample."""

_LARGEST_TRUSTED_BYTES = 1 << 20
"""Larger files are not read: no file of a bundled evaluator is larger."""


def _root() -> Path:
    return Path(str(files(_PACKAGE)))


def sample_names() -> tuple[str, ...]:
    """Return the names of the bundled sample runs, sorted."""
    return tuple(sorted(path.parent.name for path in _root().glob("*/inshrink.toml")))


def sample(name: str = "digits-cnn") -> Path:
    """Return the directory of a bundled sample run.

    Raises
    ------
    NotFoundError
        The sample does not exist; the message lists the existing ones.

    Examples
    --------
    >>> sample("digits-cnn").name
    'digits-cnn'
    """
    if name not in sample_names():
        raise NotFoundError(
            f"there is no sample run '{name}'", remedy=f"choose one of {', '.join(sample_names())}"
        )
    return _root() / name


def evaluator_digest(run_dir: Path) -> str | None:
    """Return SHA-256 (hex) over name, length and content of `TRUSTED_FILES`; None if one is missing."""
    digest = hashlib.sha256()
    for name in TRUSTED_FILES:
        path = run_dir / name
        try:
            if path.stat().st_size > _LARGEST_TRUSTED_BYTES:
                return None
            content = path.read_bytes()
        except OSError:
            return None
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def is_trusted_sample(run_dir: Path) -> bool:
    """Return whether a run's evaluator equals a bundled one, byte for byte."""
    return evaluator_digest(Path(run_dir)) in TRUSTED_DIGESTS
