"""Conformance suite for readers of a run layout: subclass `ReaderSuite`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inshrink_core.errors import InshrinkError
from inshrink_core.formats import open_run, write_checkpoint
from inshrink_core.formats.disk import Access
from inshrink_core.formats.readers import Reader

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.formats import Run

__all__ = ["ReaderSuite"]

_STEPS = (10, 20, 300)
_MAX_FLIPS = 60


class ReaderSuite(ABC):
    """Tests of the contract of a reader.

    Examples
    --------
    ::

        class TestRawReader(ReaderSuite):
            reader = RawReader()

            def save(self, folder, step, weights):
                ...
    """

    reader: Reader
    """The reader; it must be registered as an entry point."""

    @abstractmethod
    def save(self, folder: Path, step: int, weights: dict[str, Tensor]) -> Path:
        """Write a checkpoint into the folder of a run, and return its file or directory."""

    def weights(self, step: int) -> dict[str, Tensor]:
        """Return the tensors of a step's checkpoint; override if the layout cannot store them."""
        import torch

        dice = torch.Generator().manual_seed(step)
        shapes = {"embed.weight": (6, 4), "fc.weight": (3, 4), "fc.bias": (3,), "scale": (1,)}
        return {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}

    def run(self, folder: Path) -> Run:
        """Write a run of three steps, and open it."""
        for step in _STEPS:
            self.save(folder, step, self.weights(step))
        return open_run(folder)

    def test_its_checkpoints_are_detected_and_nothing_else(self, tmp_path: Path) -> None:
        """`detect` accepts the reader's checkpoints, and refuses empty, missing and foreign files."""
        access = Access.of(tmp_path)
        assert self.reader.detect(self.save(tmp_path, 10, self.weights(10)), access)
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.txt").write_text("no checkpoint")
        (tmp_path / "step_5.pt").write_bytes(b"PK\x03\x04")
        for name in ("empty", "notes.txt", "step_5.pt", "nowhere"):
            assert not self.reader.detect(tmp_path / name, access)

    def test_a_run_opens_in_step_order_with_the_values_that_were_saved(self, tmp_path: Path) -> None:
        """Every tensor is read bit for bit under its name."""
        import torch

        run = self.run(tmp_path)
        assert run.steps == _STEPS
        for step in _STEPS:
            saved = self.weights(step)
            assert run[step].keys() == saved.keys()
            for name, tensor in saved.items():
                assert torch.equal(run[step][name].view(torch.uint8), tensor.view(torch.uint8))

    def test_opening_reads_headers_only(self, tmp_path: Path) -> None:
        """Opening a run does not read the bytes of tensors."""
        import torch

        self.save(tmp_path, 10, self.weights(10) | {"large": torch.zeros(1 << 20)})
        assert open_run(tmp_path).bytes_read < 1 << 20

    def test_a_checkpoint_is_written_back_byte_for_byte(self, tmp_path: Path) -> None:
        """Every byte of a checkpoint's files is restored."""
        (tmp_path / "run").mkdir()
        run = self.run(tmp_path / "run")
        for step in run.steps:
            root = run.path_of(step)
            folder = root if root.is_dir() else root.parent
            for path in write_checkpoint(run[step], tmp_path / str(step)):
                name = path.relative_to(tmp_path / str(step))
                assert path.read_bytes() == (folder / name).read_bytes()

    def test_what_was_read_before_changes_nothing(self, tmp_path: Path) -> None:
        """A checkpoint opens the same, whichever was opened before it."""
        run = self.run(tmp_path)

        def opened(step: int) -> object:
            path = run.path_of(step)
            return self.reader.open(path, Access.of(path if path.is_dir() else path.parent))

        assert {step: opened(step) for step in run.steps} == {s: opened(s) for s in reversed(run.steps)}

    def test_damage_is_an_error_of_ours_or_another_checkpoint(self, tmp_path: Path) -> None:
        """A truncated file, or one with a flipped bit, raises no error but `InshrinkError`."""
        path = self.save(tmp_path, 10, self.weights(10))
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        for file in files:
            content = file.read_bytes()
            stride = max(1, len(content) // _MAX_FLIPS)
            for at in range(0, len(content), stride):
                flipped = bytes([content[at] ^ 1 << at % 8])
                for damaged in (content[:at], content[:at] + flipped + content[at + 1 :]):
                    file.write_bytes(damaged)
                    _read_all(tmp_path)
            file.write_bytes(content)

    def test_a_link_out_of_the_run_is_not_followed(self, tmp_path: Path) -> None:
        """A link to a file outside of the run is refused."""
        (tmp_path / "run").mkdir()
        (tmp_path / "elsewhere").mkdir()
        path = self.save(tmp_path / "run", 10, self.weights(10))
        largest = max(
            [path] if path.is_file() else path.rglob("*"),
            key=lambda file: file.stat().st_size * file.is_file(),
        )
        target = largest.rename(tmp_path / "elsewhere" / largest.name)
        largest.symlink_to(target)
        with pytest.raises(InshrinkError):
            open_run(tmp_path / "run")


def _read_all(folder: Path) -> None:
    try:
        for checkpoint in open_run(folder).values():
            for spec in checkpoint.specs:
                checkpoint.source.read(spec)
            for file in checkpoint.files:
                checkpoint.source.skeleton(file)
    except InshrinkError:
        return
