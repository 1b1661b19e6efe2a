"""Read the zip container of `torch.save`: locate entries and check bounds, without unpacking.

Python's zipfile is not used. It hides the positions of an entry's bytes and checksum, which are needed to
read single tensors and to restore files. It also parses some files differently from PyTorch. Layout of the
records: PKWARE APPNOTE 6.3.10, sections 4.3.7-4.3.16.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from inshrink_core.checkpoint import ZipEntry
from inshrink_core.errors import ChecksumError, DamagedError, clipped
from inshrink_core.formats.disk import Readable, ReadableFile, damaged
from inshrink_core.formats.torch.pickles import MAX_PICKLE_BYTES

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4sI")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")

_MAX_DIRECTORY_BYTES: Final = 512 << 20
"""Size of a central directory with 4 M entries; PyTorch's own writer stays far below."""

_TAIL_BYTES: Final = 4 << 10
"""Size of the first read, at the end, which finds the end record."""

_GAP_BYTES: Final = 256
"""Maximum gap between the data of an entry and the next header; PyTorch's writer leaves at most 24."""

_ALIGNMENT: Final = 64
"""Alignment of every entry's data in files written by PyTorch."""

_HAS_DESCRIPTOR = 0x08
_FLAGS_OF_TORCH = 0x0808
_ENCRYPTED = 0x01
_U32_MAX = 0xFFFFFFFF


class CheckedEntry(NamedTuple):
    """The bytes of one entry and their CRC-32.

    `contradiction` describes a conflict between its records, if any. `crc_offsets` are the positions to
    update with a new CRC-32 when the bytes change.
    """

    offset: int
    nbytes: int
    name: str
    crc: int
    contradiction: str
    crc_offsets: tuple[int, ...]


class _Record(NamedTuple):
    header_offset: int
    name: bytes
    crc: int
    nbytes: int
    central_offset: int


def is_zip(first_bytes: bytes) -> bool:
    """Return whether a file with these first bytes is a zip."""
    return first_bytes[:4] == b"PK\x03\x04"


def _find_directory(file: Readable) -> tuple[int, int, int]:
    """Return offset, size and number of entries of the central directory."""
    tail_offset = max(0, file.nbytes - _TAIL_BYTES)
    tail = file.read(tail_offset, file.nbytes - tail_offset, compared=False)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise damaged(file, "the zip directory at the end of the file is missing")
    *_, n_entries, n_bytes, offset, comment_nbytes = _END.unpack_from(tail, at)
    end_offset = tail_offset + at
    if end_offset + _END.size + comment_nbytes != file.nbytes:
        raise damaged(file, "bytes follow the end of the zip")
    limit = end_offset
    if n_entries == 0xFFFF or n_bytes == _U32_MAX or offset == _U32_MAX:
        locator_offset = end_offset - _END64_LOCATOR.size
        if locator_offset < 0:
            raise damaged(file, "the zip64 record is missing")
        magic, _, end64_offset, _ = _END64_LOCATOR.unpack(file.read(locator_offset, _END64_LOCATOR.size))
        if magic != b"PK\x06\x07" or end64_offset + _END64.size > locator_offset:
            raise damaged(file, "the zip64 record is damaged")
        magic, *_, n_entries, n_bytes, offset = _END64.unpack(file.read(end64_offset, _END64.size))
        if magic != b"PK\x06\x06":
            raise damaged(file, "the zip64 record is damaged")
        limit = end64_offset
    if offset + n_bytes > limit or n_bytes > _MAX_DIRECTORY_BYTES or n_entries * _CENTRAL.size > n_bytes:
        raise damaged(file, "the zip directory does not fit its file")
    return offset, n_bytes, n_entries


def _zip64_values(file: Readable, extra: bytes, values: list[int]) -> list[int]:
    """Return the three sizes, with values that overflow 32 bits taken from the zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wanted = [i for i, value in enumerate(values) if value == _U32_MAX]
            if size < 8 * len(wanted) or at + 4 + size > len(extra):
                break
            for n, i in enumerate(wanted):
                values[i] = struct.unpack_from("<Q", extra, at + 4 + 8 * n)[0]
            return values
        at += 4 + size
    raise damaged(file, "a zip64 field is missing")


def _read_directory(file: Readable) -> list[_Record]:
    offset, n_bytes, n_entries = _find_directory(file)
    data = file.read(offset, n_bytes, compared=False)
    records: list[_Record] = []
    at, unpack = 0, _CENTRAL.unpack_from
    for _ in range(n_entries):
        if at + _CENTRAL.size > n_bytes:
            raise damaged(file, "the zip directory is cut off")
        magic, _, _, flags, method, _, _, crc, stored, nbytes, *lengths, _, _, _, header = unpack(data, at)
        n_name, n_extra, n_comment = lengths
        name_at = at + _CENTRAL.size
        next_at = name_at + n_name + n_extra + n_comment
        if magic != b"PK\x01\x02" or next_at > n_bytes:
            raise damaged(file, f"entry {len(records)} of the zip directory is damaged")
        if _U32_MAX in (nbytes, stored, header):
            extra = data[name_at + n_name : name_at + n_name + n_extra]
            nbytes, stored, header = _zip64_values(file, extra, [nbytes, stored, header])
        if method != 0 and b"/code/__torch__" in data[name_at : name_at + n_name]:
            raise _torchscript(file)
        if method != 0 or stored != nbytes or flags & _ENCRYPTED:
            raise damaged(file, "an entry of the zip is compressed or encrypted, which torch.save never does")
        records.append(_Record(header, data[name_at : name_at + n_name], crc, nbytes, offset + at))
        at = next_at
    if at != n_bytes:
        raise damaged(file, "bytes follow the last entry of the zip directory")
    return records


def read_entries(file: Readable) -> tuple[list[CheckedEntry], bool]:
    """Return every entry of a zip by offset, and whether the zip was written with checksums.

    Raises
    ------
    DamagedError
        The zip is truncated, compressed or has overlapping entries.

    Notes
    -----
    PyTorch writes 0 for every entry if checksums are disabled (`set_crc32_options(False)`). A
    single entry can have the checksum 0, but not all of them.
    """
    records = sorted(_read_directory(file))
    have_checksums = any(record.crc for record in records if record.nbytes)
    limits = [record.header_offset for record in records[1:]]
    limits.append(min((record.central_offset for record in records), default=0))
    gaps: dict[int, _Gap] = {}
    if isinstance(file, ReadableFile):
        gaps = _gaps_of_torch(file, records, limits)
        # Prefetch the header of each entry, and the gap before it.
        unknown = (item.header_offset for item in records if item.header_offset not in gaps)
        file.expect((max(0, at - _GAP_BYTES), _GAP_BYTES + _LOCAL.size) for at in unknown)
        if gaps:
            file.assume((gap.offset, gap.content, gap.end) for gap in gaps.values())
    given = {gap.offset: gap.content for gap in gaps.values()}
    given |= {begin: gap.content[begin - gap.offset :] for begin, gap in gaps.items()}

    def read(offset: int, n_bytes: int) -> bytes:
        return given[offset][:n_bytes] if offset in given else file.read(offset, n_bytes)

    entries = []
    for record, limit in zip(records, limits, strict=False):
        begin, name, crc, nbytes, central = record
        header = _LOCAL.unpack(read(begin, _LOCAL.size))
        magic, _, flags, method, _, _, header_crc, _, _, n_name, n_extra = header
        offset = begin + _LOCAL.size + n_name + n_extra
        end = offset + nbytes
        if magic != b"PK\x03\x04" or method != 0 or n_name != len(name) or end > limit:
            raise damaged(file, f"entry '{clipped(_text(name))}' of the zip is damaged")
        behind, behind_at = None, end
        if flags & _HAS_DESCRIPTOR and end + _DESCRIPTOR.size <= limit:
            magic, behind = _DESCRIPTOR.unpack(read(end, _DESCRIPTOR.size))
            behind_at = end + 4
            if magic != b"PK\x07\x08":
                # The signature is optional (APPNOTE 4.3.9.3).
                behind, behind_at = int.from_bytes(magic, "little"), end
        # A header written before its data cannot contain the checksum; the field is then 0.
        contradicted = header_crc != crc and not (flags & _HAS_DESCRIPTOR and not header_crc)
        contradicted |= bool(nbytes) and behind not in (None, crc)
        places: tuple[int, ...] = ()
        if have_checksums and nbytes:
            places = ((begin + 14,) if header_crc == crc else ()) + ((behind_at,) if behind == crc else ())
            places += (central + 16,)
        text = ""
        if contradicted:
            text = f"the records of entry '{clipped(_text(name))}' of the zip have different CRC-32s"
        entries.append(CheckedEntry(offset, nbytes, _text(name), crc, text, places))
    return entries, have_checksums


class _Gap(NamedTuple):
    """The bytes between two entries in files written by PyTorch; the second entry ends at `end`."""

    offset: int
    content: bytes
    end: int


def _gaps_of_torch(file: ReadableFile, records: list[_Record], limits: list[int]) -> dict[int, _Gap]:
    """Return the predicted gaps before entries of a remote file, by header offset, without reading all.

    In a file written by PyTorch the directory determines every gap byte for byte. The prediction requires
    that all gaps have the predicted size, and that the last gap and all local ones match. Each gap is still
    compared when it is read.
    """
    if not file.is_elsewhere:
        return {}
    framed = [_framed(record, limit) for record, limit in zip(records, limits, strict=True)]
    gaps: dict[int, _Gap] = {}
    seen = 0
    for i in range(1, len(records)):
        before, entry = framed[i - 1], framed[i]
        if before is None or entry is None:
            continue
        header, footer = entry[0], before[1]
        begin = records[i].header_offset
        gap = _Gap(begin - len(footer), footer + header, begin + len(header) + records[i].nbytes)
        if i + 1 == len(records) or file.is_here(gap.offset, len(gap.content)):
            if file.read(gap.offset, len(gap.content)) != gap.content:
                return {}
            seen += 1
        gaps[begin] = gap
    return gaps if seen else {}


def _framed(record: _Record, limit: int) -> tuple[bytes, bytes] | None:
    """Return the bytes before and after an entry's data in PyTorch's layout; None if they do not fit."""
    begin, name, crc, nbytes, _ = record
    large = [nbytes, 0] if nbytes >= _U32_MAX else []
    large += [begin] if begin >= _U32_MAX else []
    wide = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    padding = -(begin + _LOCAL.size + len(name) + len(wide) + 4) % _ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS_OF_TORCH, 0, 0, 0, 0, 0, 0, len(name), len(extra))
    header += name + extra
    footer = _DESCRIPTOR.pack(b"PK\x07\x08", crc) + struct.pack("<2Q" if large else "<2I", nbytes, nbytes)
    return (header, footer) if begin + len(header) + nbytes + len(footer) == limit else None


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _torchscript(file: Readable) -> DamagedError:
    remedy = "if you trust it: torch.save(torch.jit.load(path).state_dict(), path)"
    return DamagedError("a TorchScript module, not a checkpoint", where=str(file.path), remedy=remedy)


def read_torch_zip(file: Readable, *, allow_damaged: bool = False) -> tuple[bytes, dict[str, ZipEntry]]:
    """Return ``data.pkl`` of a torch file and its storages by key, without reading tensor bytes.

    Parameters
    ----------
    file
        An open zip file.
    allow_damaged
        Accept a pickle that does not match its checksum.

    Raises
    ------
    DamagedError
        The zip is truncated, compressed, has overlapping entries, or is no torch file.
    ChecksumError
        ``data.pkl`` does not match its CRC-32.

    Notes
    -----
    Reads the directory, ``data.pkl``, ``byteorder`` and about a hundred bytes for each entry. For
    a remote file written by PyTorch these bytes are predicted, and compared before anything of the entry is
    read.
    """
    entries, have_checksums = read_entries(file)
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise damaged(file, "two entries of the zip have one name")
    pickles = [name for name in by_name if name.rpartition("/")[2] == "data.pkl" and name.count("/") <= 1]
    if len(pickles) != 1:
        what, found = "the zip is no PyTorch checkpoint", str(len(pickles))
        raise DamagedError(what, where=str(file.path), expected="one data.pkl", found=found)
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in by_name:
        raise _torchscript(file)
    if (entry := by_name.get(f"{folder}byteorder")) is not None:
        order = file.read(entry.offset, min(entry.nbytes, 16))
        if order != b"little":
            raise damaged(file, f"its tensors are in byte order {order!r}; only little-endian is read")
    entry = by_name[pickles[0]]
    if entry.nbytes > MAX_PICKLE_BYTES:
        raise damaged(file, f"its data.pkl of {entry.nbytes} bytes is too large to be a checkpoint's")
    pickle_bytes = file.read(entry.offset, entry.nbytes)
    crc = crc32(pickle_bytes)
    if have_checksums and crc != entry.crc and not allow_damaged:
        what = f"entry '{clipped(entry.name)}' of the zip does not match its CRC-32"
        expected, found = f"{entry.crc:08x}", f"{crc:08x}"
        raise ChecksumError(what, path=file.path, offset=entry.offset, expected=expected, found=found)
    prefix = f"{folder}data/"
    items = ((e.name.removeprefix(prefix), e) for e in entries if e.name.startswith(prefix))
    return pickle_bytes, {key: ZipEntry(e.offset, e.nbytes, e.crc_offsets) for key, e in items}
