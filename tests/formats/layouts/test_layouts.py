"""Runs of every public layout: their steps in order, the fate of every file, models, and one whole trip."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

import inshrink_core
from benchmarks import reference
from inshrink_core.errors import CheckFailedError, NotFoundError
from inshrink_core.formats import NoCheckpointError
from inshrink_core.verbs import inspect
from tests.formats.layouts.files import fates_of, tensor_files
from tests.formats.layouts.layout import Layout
from tests.formats.layouts.table import TABLE

LEFT_OUT = {"left out", "unreadable"}
DOCS = Path(reference.__file__).parents[1] / "docs"


class Written(NamedTuple):
    layout: Layout
    folder: Path

    @property
    def run(self):
        return inshrink_core.open(self.folder)


@pytest.fixture(scope="module", params=TABLE, ids=lambda row: row.name)
def any_layout(request, tmp_path_factory):
    """A layout and a run of it, whether or not anything of it can be read."""
    return Written(request.param, request.param.write(tmp_path_factory.mktemp("layout") / "run"))


@pytest.fixture(scope="module", params=[row for row in TABLE if row.is_readable], ids=lambda row: row.name)
def written(request, tmp_path_factory):
    """A layout with a step that can be read, and a run of it."""
    return Written(request.param, request.param.write(tmp_path_factory.mktemp("layout") / "run"))


def test_steps_are_those_of_the_training_in_its_order(written):
    layout, run = written.layout, written.run
    if layout.steps:
        assert run.steps == layout.steps
    else:
        found = [run.path_of(step).relative_to(written.folder).as_posix() for step in run.steps]
        assert len(found) == len(layout.order)
        for path, expected in zip(found, layout.order, strict=True):
            assert f"{expected}/".startswith(f"{path}/")


def test_every_tensor_file_has_one_fate_and_it_is_the_one_of_the_table(written):
    layout, run = written.layout, written.run
    expected = {path: {"branch"} for paths in layout.branches.values() for path in paths}
    expected |= {path: {"duplicate"} for path in layout.duplicates}
    expected |= {path: {"auxiliary", "branch"} for path in layout.beside}
    expected |= {path: {"other model"} for path in layout.other_models}
    wrong = {}
    for path in tensor_files(written.folder):
        found = [str(fate.fate) for fate in fates_of(run, path)]
        if len(found) != 1 or found[0] not in expected.get(path, {"step", "auxiliary"}):
            wrong[path] = found
    assert not wrong
    assert {fate.step for fate in run.fates if fate.fate == "step"} == set(run.steps)


def test_checkpoints_beside_the_steps_are_branches_by_name(written):
    layout, run = written.layout, written.run
    for name, paths in layout.branches.items():
        (called,) = {fate.name for path in paths for fate in fates_of(run, path)}
        assert name in called
        assert run.branches[called].specs
    beside = {fate.name for path in layout.beside for fate in fates_of(run, path) if fate.name}
    assert len(run.branches) == len(layout.branches) + len(beside)


def test_parameters_roles_and_models_of_a_step_are_told_apart(written):
    layout, run = written.layout, written.run
    for step in run.steps:
        checkpoint = run[step]
        assert {spec.role.value for spec in checkpoint.specs} == layout.roles
        assert bool(checkpoint.models) == bool(layout.models)
        for model in layout.models:
            called = re.compile(rf"(\w+[._])?{model}([._]\w+)?", re.IGNORECASE)
            (name, *_) = sorted(filter(called.fullmatch, checkpoint.models), key=len)
            assert [spec for spec in checkpoint.specs if spec.name.startswith(f"{name}.")]
    if layout.parameters is not None:
        assert inspect(written.folder).facts["n_parameters"] == layout.parameters


def test_what_cannot_be_read_is_named(any_layout, tmp_path):
    layout = any_layout.layout
    if layout.is_readable:
        left_out = {fate.path for fate in any_layout.run.fates if fate.fate in LEFT_OUT}
        assert left_out == set(layout.left_out)
        return
    with pytest.raises(NoCheckpointError) as caught:
        inshrink_core.open(any_layout.folder)
    named = {Path(row.path).relative_to(any_layout.folder).as_posix() for row in caught.value.skipped}
    assert set(layout.left_out) <= named
    with pytest.raises(NotFoundError):
        inshrink_core.compress(any_layout.folder, tmp_path / "a.inshrink")


def compress(written, archive, **options):
    """Compress a run, which fails exactly where the table says that something is left out."""
    fails = pytest.raises(CheckFailedError) if written.layout.left_out else nullcontext()
    with fails:
        inshrink_core.compress(written.folder, archive, **options)


def carried(written):
    """Return the tensor files that are archived, as parts of steps or as branches."""
    fates = {path: fates_of(written.run, path) for path in tensor_files(written.folder)}
    return [path for path, (fate,) in fates.items() if fate.fate in ("step", "auxiliary", "branch")]


def test_a_whole_trip_brings_back_every_file_that_is_archived(written, tmp_path):
    archive, target = tmp_path / "a.inshrink", tmp_path / "restored"
    compress(written, archive, codec="lossless", optimizer="exact")
    inshrink_core.restore(archive, target, every=True)
    restored = {path.read_bytes() for path in target.rglob("*") if path.is_file()}
    paths = carried(written)
    assert paths
    assert not [path for path in paths if (written.folder / path).read_bytes() not in restored]


OF_EACH_KIND = {row.roles: row for row in TABLE if row.is_readable}.values()
"""A layout for each set of roles that tensors have: what a codec does depends on nothing else."""


@pytest.mark.parametrize("layout", OF_EACH_KIND, ids=lambda row: row.name)
def test_default_codecs_bring_back_every_step_as_files_of_the_same_size(layout, tmp_path):
    written = Written(layout, layout.write(tmp_path / "run"))
    archive, target = tmp_path / "a.inshrink", tmp_path / "restored"
    compress(written, archive)
    assert inshrink_core.open(archive).steps == written.run.steps
    inshrink_core.restore(archive, target, every=True)
    sizes = {path.stat().st_size for path in target.rglob("*") if path.is_file()}
    assert not [path for path in carried(written) if (written.folder / path).stat().st_size not in sizes]


def test_the_table_of_layouts_in_the_documentation_is_the_one_of_these_tests():
    assert reference.page("runs.md") == (DOCS / "runs.md").read_text(), "run make reference"


def test_layouts_have_distinct_names_and_are_at_least_45():
    assert len({row.name for row in TABLE}) == len(TABLE) >= 45
