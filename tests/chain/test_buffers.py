"""Which buffers come back bit for bit, and that `compress` says which do not."""

import io

import pytest
from rich.console import Console

import inshrink_core
from inshrink_core.checkpoint import TensorRole

OVERRIDE = {"match": "*.running_*", "exact": True}


@pytest.mark.parametrize(
    ("asked", "rounded", "words"),
    [
        ({}, {"1.running_mean", "1.running_var"}, "--set exact=true keeps every bit"),
        ({"config": {"overrides": [OVERRIDE]}}, set(), ""),
        ({"config": {"exact": True}}, set(), ""),
        ({"codec": "inshrinkerator"}, set(), ""),
    ],
)
def test_buffers_that_are_rounded_are_told_with_what_keeps_them(run_path, tmp_path, asked, rounded, words):
    report = inshrink_core.compress(run_path, tmp_path / "a.inshrink", **asked)
    originals, restored = inshrink_core.open(run_path), inshrink_core.open(tmp_path / "a.inshrink")
    different = {
        spec.name
        for step in originals.steps
        for spec in originals[step].specs
        if spec.role is TensorRole.BUFFER and not originals[step][spec.key].equal(restored[step][spec.key])
    }
    assert different == rounded
    shown = Console(file=io.StringIO(), width=200)
    report.show(shown)
    lines = shown.file.getvalue().splitlines()
    row = next((line for line in lines if line.startswith("buffers")), "")
    assert bool(row) == bool(rounded)
    assert words in row
