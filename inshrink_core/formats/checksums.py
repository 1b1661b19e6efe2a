"""Verify the bytes of a file: CRC-32 of zip entries, and digests stored beside the file.

Bytes to be archived are read through `FileChecks`, which verifies the returned buffer itself. If a read
covers only part of a checksum's span, it is verified page by page. One pass over the span verifies the
checksum and records the CRC-32 of every page, and each read compares its pages with these.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from inshrink_core.errors import ChecksumError, DamagedError, InshrinkError, clipped
from inshrink_core.formats.disk import ByteCounter, Readable, ReadableFile, Window, is_file, stamp_of
from inshrink_core.formats.torch.zip import CheckedEntry, is_zip, read_entries

_PAGE: Final = 1 << 16
_CHUNK: Final = 1 << 24
"""Bytes per read in a pass over the span of one checksum; a multiple of a page."""

_MAX_DIGEST_FILE_BYTES: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")


class Digest(NamedTuple):
    """The SHA-256 of a whole file, and its origin."""

    value: str
    origin: str


class Damage(NamedTuple):
    """Accepted damage: bytes that differ from their stored checksum.

    `entry` is the zip entry, ``""`` for the whole file; `crc` is the CRC-32 of the present bytes.
    """

    file: str
    entry: str
    offset: int
    nbytes: int
    crc: int


class PackedZip(NamedTuple):
    """A zip within a file; `optional` if it is carried unread and may not come from `torch.save`."""

    offset: int
    nbytes: int
    optional: bool


def digest_beside(path: Path) -> Digest | None:
    """Return the known digest of a file; None if it has none.

    Parameters
    ----------
    path
        The file, under its name in the run.

    Notes
    -----
    Supports three conventions: a large blob in the Hugging Face cache is named after its digest; a file
    ``NAME.sha256`` beside the file; a line for it in ``SHA256SUMS`` beside it.
    """
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and path.is_symlink() and _SHA256.fullmatch(real.name):
        return Digest(real.name.lower(), str(real))
    for beside in (f"{path.name}.sha256", "SHA256SUMS"):
        for value, name in _listed(path.parent / beside):
            # A digest without a name belongs to the file that its own name refers to.
            if name.rpartition("/")[2] == path.name or not (name or beside == "SHA256SUMS"):
                return Digest(value, str(path.parent / beside))
    return None


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (digest, name) for each line in the format of `sha256sum`."""
    # Ignore links, which could lead anywhere.
    if os.path.islink(path) or not is_file(path):  # noqa: PTH114 - the name may be too long for a Path
        return
    try:
        with ReadableFile(path, ByteCounter(), stamp_of(path)) as file:
            text = file.read(0, min(file.nbytes, _MAX_DIGEST_FILE_BYTES)).decode(errors="replace")
    except InshrinkError:
        return
    for line in text.splitlines():
        value, _, name = line.strip().partition(" ")
        if _SHA256.fullmatch(value):
            yield value.lower(), name.strip().removeprefix("*")


class FileChecks:
    """The checksums of one file, verified as it is read; safe for any thread.

    Parameters
    ----------
    file
        The open file; its records are read now, its content later.
    name
        Its name in the run.
    tensors
        Key, first byte and extent of its tensors, for messages. A file without any is carried unread: it may
        not be a zip of `torch.save`, and then has no checksums.
    accepted
        Damage that the user accepted; these bytes must not change further.
    zips
        For a file that is a sequence of zips, the span of each, in order.
    """

    def __init__(
        self,
        file: ReadableFile,
        name: str,
        tensors: Sequence[tuple[str, int, int]] = (),
        accepted: Sequence[Damage] = (),
        zips: Sequence[PackedZip] = (),
    ) -> None:
        self.name, self.digest = name, digest_beside(file.path)
        self._tensors = tensors
        self._accepted = {damage.entry: damage.crc for damage in accepted}
        self._entries = _packed_entries(file, zips) if zips else _entries_of(file, not tensors)
        self._starts = [entry.offset for entry in self._entries]
        self._full_span = CheckedEntry(0, file.nbytes, "", 0, "", ())
        self._pages: dict[CheckedEntry, list[int]] = {}
        self._lock = threading.Lock()

    @property
    def algorithms(self) -> set[str]:
        """Names of the checksums that cover the file."""
        return {name for name, has in (("crc32", self._entries), ("sha256", self.digest)) if has}

    def read(self, file: ReadableFile, offset: int, nbytes: int) -> memoryview:
        """Return bytes in a new buffer, after verifying its checksums.

        Raises
        ------
        ChecksumError
            The bytes do not match a checksum.
        """
        if self.digest is not None:
            buffer = self._read_pages(file, self._full_span, offset, nbytes)
        else:
            buffer = file.read_buffer(offset, nbytes)
        at = max(0, bisect_right(self._starts, offset) - 1)
        for i in range(at, len(self._entries)):
            entry = self._entries[i]
            if entry.offset >= offset + nbytes:
                break
            first, last = max(offset, entry.offset), min(offset + nbytes, entry.offset + entry.nbytes)
            if first > last or (first == last and entry.nbytes):
                continue
            part = buffer[first - offset : last - offset]
            if last - first == entry.nbytes:
                self._require(file, entry, crc32(part))
            elif self._read_pages(file, entry, first, last - first) != part:
                raise _changed(file)
        return buffer

    def damage(self, file: ReadableFile) -> list[Damage]:
        """Read the whole file and return all mismatches instead of raising errors."""
        found = []
        for span in [*self._entries, *([self._full_span] if self.digest else [])]:
            try:
                crc, digest = self._pass_over(file, span, [])
                self._require(file, span, crc, digest)
            except ChecksumError:
                found.append(Damage(self.name, span.name, span.offset, span.nbytes, crc))
        return found

    def _require(self, file: ReadableFile, span: CheckedEntry, crc: int, digest: str = "") -> None:
        """Refuse a span whose checksum does not match, and damage that changed since it was accepted."""
        accepted = self._accepted.get(span.name)
        if accepted is not None:
            if accepted != crc:
                raise _changed(file)
        elif span is not self._full_span:
            what = f"entry '{clipped(span.name)}' of the zip does not match its CRC-32"
            if span.contradiction:
                raise self._mismatch(file, span, span.contradiction)
            if span.crc != crc:
                raise self._mismatch(file, span, what, expected=f"{span.crc:08x}", found=f"{crc:08x}")
        elif self.digest is not None and digest != self.digest.value:
            what = f"the file does not match its digest in '{self.digest.origin}'"
            raise self._mismatch(file, span, what, expected=self.digest.value, found=digest)

    def _mismatch(self, file: ReadableFile, span: CheckedEntry, what: str, **facts: str) -> ChecksumError:
        end = span.offset + span.nbytes
        keys = tuple(key for key, at, nbytes in self._tensors if at < end and span.offset < at + nbytes)
        return ChecksumError(what, path=file.path, offset=span.offset, tensors=keys, **facts)

    def _read_pages(self, file: ReadableFile, span: CheckedEntry, offset: int, nbytes: int) -> memoryview:
        """Return bytes of a span, read by whole pages and compared with the recorded CRC-32s."""
        pages = self._pages_of(file, span)
        first = (offset - span.offset) // _PAGE
        start = span.offset + first * _PAGE
        end = min(span.offset + span.nbytes, offset + nbytes + -(offset + nbytes - span.offset) % _PAGE)
        buffer = file.read_buffer(start, end - start)
        for i in range(0, end - start, _PAGE):
            if crc32(buffer[i : i + _PAGE]) != pages[first + i // _PAGE]:
                raise _changed(file)
        return buffer[offset - start : offset - start + nbytes]

    def _pages_of(self, file: ReadableFile, span: CheckedEntry) -> list[int]:
        with self._lock:
            pages = self._pages.get(span)
            if pages is None:
                pages = []
                crc, digest = self._pass_over(file, span, pages)
                self._require(file, span, crc, digest)
                self._pages[span] = pages
            return pages

    def _pass_over(self, file: ReadableFile, span: CheckedEntry, pages: list[int]) -> tuple[int, str]:
        """Read a span once; return its CRC-32 and its digest, and record the CRC-32 of each page."""
        hasher = hashlib.sha256() if span is self._full_span else None
        crc = 0
        for at in range(0, span.nbytes, _CHUNK):
            chunk = file.read_buffer(span.offset + at, min(_CHUNK, span.nbytes - at))
            crc = crc32(chunk, crc)
            pages += [crc32(chunk[i : i + _PAGE]) for i in range(0, len(chunk), _PAGE)]
            if hasher is not None:
                hasher.update(chunk)
        return crc, "" if hasher is None else hasher.hexdigest()


def _packed_entries(file: ReadableFile, zips: Sequence[PackedZip]) -> list[CheckedEntry]:
    """Return the entries of all zips in a sequence, with file offsets; names include the zip's offset."""
    return [
        entry._replace(
            offset=entry.offset + packed.offset,
            name=f"{entry.name} at {packed.offset}",
            crc_offsets=tuple(at + packed.offset for at in entry.crc_offsets),
        )
        for packed in zips
        for entry in _entries_of(Window(file, packed.offset, packed.nbytes), packed.optional)
    ]


def _entries_of(file: Readable, optional: bool) -> list[CheckedEntry]:
    """Return the entries of a zip in order of offset; none if they have no checksums."""
    entries: list[CheckedEntry] = []
    have_checksums = False
    with suppress(*(DamagedError,) * optional):
        if is_zip(file.read(0, min(4, file.nbytes))):
            entries, have_checksums = read_entries(file)
    return entries if have_checksums else []


def _changed(file: ReadableFile) -> DamagedError:
    what = "the file gave other bytes when it was read again"
    return DamagedError(what, where=str(file.path), remedy="check the disk")
