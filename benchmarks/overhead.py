"""Which bytes of an archive are coded data, and which are overhead.

Data are the words of the rANS streams that hold symbols, symbols packed in bits, and values stored as they
are. All else is overhead: header, index, trailer and padding of each frame, the manifest, the head of each
block, and of each rANS stream its header, its probability tables, its word counts and its lane states. The
classes of rows and columns that choose contexts are overhead too. It is counted while the archive is
decoded, by listening to the parsers that the decoder itself uses. Blocks of buffers, which are lossless,
count as data but for their heads.

``results/overhead.csv`` has the share for the runs of `benchmarks.runs`, weights and buffers alone, under
the lattice codec; that of larger models is in ``results/scaling.csv``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks.results import write
from benchmarks.runs import open_run
from inshrink_core.chain.sizes import archive_size
from inshrink_core.codecs.lattice import block as lattice_block
from inshrink_core.coding import rans
from inshrink_core.ops.reference.streams import parse_stream
from inshrink_core.ops.streams import WORD_BYTES

RUNS = ("digits-cnn", "cnn-adamw", "cnn-sgd", "fine-tune", "char-gpt")
COARSENESS = (2.5, 4.0)
BLOCK_HEAD_BYTES = 16
"""At most, of a lattice block: kind, exponent or shift, step, lengths of sections, alphabet, coder's mode."""


@dataclass
class SideBytes:
    """Bytes of streams that are no words of symbols, as far as was parsed."""

    tables_nbytes: int = 0


@contextmanager
def listening() -> Iterator[SideBytes]:
    """Count what the parsers of rANS streams and of scale classes read, while it lasts."""
    found, read_stream, parse_scales = SideBytes(), rans.read_stream, lattice_block.parse_scales

    def stream(coded: Any, contexts: Any) -> Any:
        words = parse_stream(coded).blocks.words
        found.tables_nbytes += len(coded.payload) - WORD_BYTES * words.numel()
        return read_stream(coded, contexts)

    def scales(section: Any, *rest: Any) -> Any:
        before = found.tables_nbytes
        contexts = parse_scales(section, *rest)
        found.tables_nbytes = before + len(section)
        return contexts

    with _replaced(rans, "read_stream", stream), _replaced(lattice_block, "parse_scales", scales):
        yield found


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of a module's for a while."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def overhead_share(archive: Path) -> float:
    """Return the share of an archive's bytes that is overhead; the checkpoint's attachments are left out.

    Parameters
    ----------
    archive
        An archive of weights that the lattice codec wrote. The skeletons of the checkpoints (names and
        places of tensors in their files) are neither data nor overhead.
    """
    opened = inshrink_core.Archive.open(archive)
    size = archive_size(opened)
    walk = opened.sequential()
    with listening() as side:
        for step in opened.steps:
            checkpoint = walk[step]
            for spec in checkpoint.specs:
                checkpoint.source.read(spec)
    n_blocks = sum(len(frame.tensors) for frame in size.frames)
    attachments = sum(frame.attachments_nbytes for frame in size.frames)
    framing = sum(frame.overhead_nbytes for frame in size.frames) + size.manifest_nbytes
    overhead = framing + n_blocks * BLOCK_HEAD_BYTES + side.tables_nbytes
    return overhead / (size.nbytes - attachments)


def main(quick: bool = False) -> Path:
    """Write ``results/overhead.csv``; quick: the sample alone."""
    rows: list[dict[str, object]] = []
    for name in RUNS[:1] if quick else RUNS:
        for coarseness in COARSENESS:
            with tempfile.TemporaryDirectory() as scratch:
                archive = Path(scratch) / "run.inshrink"
                config = {"coarseness": coarseness}
                report = inshrink_core.compress(
                    open_run(name), archive, codec="lattice", config=config, optimizer="drop", threads=1
                )
                rows.append(
                    {
                        "run": name,
                        "codec": "lattice",
                        "coarseness": coarseness,
                        "parameters": report.size.frames[0].n_weights,
                        "steps": len(report.size.frames),
                        "ratio_weights": report.size.ratio_weights,
                        "overhead": overhead_share(archive),
                    }
                )
            sys.stderr.write(f"{rows[-1]}\n")
    return write("overhead_quick" if quick else "overhead", rows)


if __name__ == "__main__":
    main()
