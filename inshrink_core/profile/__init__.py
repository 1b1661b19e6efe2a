"""A run's sensitivities over steps × tensors, measured in a stream and cached on disk."""

from __future__ import annotations

from inshrink_core.profile.measure import CheckpointSeries, profile, sensitivity
from inshrink_core.profile.table import Grouping, Profile, Row, SensitivityTable

__all__ = [
    "CheckpointSeries",
    "Grouping",
    "Profile",
    "Row",
    "SensitivityTable",
    "profile",
    "sensitivity",
]
