"""Lossless compressors as they come: zstd, 7-zip, pcodec and ZipNN on the bytes of float32 tensors."""

from __future__ import annotations

import io
import lzma
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Compressor(NamedTuple):
    """Two functions that undo each other; the compressed form knows its own length."""

    compress: Callable[[Bytes], bytes]
    decompress: Callable[[bytes], Bytes]


def zstd(level: int) -> Compressor:
    """Return zstd, one thread."""
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Compressor(
        lambda raw: packer.compress(raw.tobytes()), lambda packed: _bytes(unpacker.decompress(packed))
    )


def seven_zip() -> Compressor:
    """Return 7-zip at its highest preset: the program, else py7zr, else the same LZMA2 of Python's lzma.

    Raises
    ------
    ImportError
        Neither the program nor py7zr is installed.
    """
    program = which("7z") or which("7zz") or which("7za")
    if program:
        return Compressor(
            lambda raw: _by_program(program, raw), lambda packed: _undo_program(program, packed)
        )
    import py7zr

    filters = [{"id": lzma.FILTER_LZMA2, "preset": lzma.PRESET_EXTREME | 9}]

    def compress(raw: Bytes) -> bytes:
        target = io.BytesIO()
        with py7zr.SevenZipFile(target, "w", filters=filters) as archive:
            archive.writestr(raw.tobytes(), "a")
        return target.getvalue()

    def decompress(packed: bytes) -> Bytes:
        with tempfile.TemporaryDirectory() as scratch, py7zr.SevenZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(scratch)
            return _bytes((Path(scratch) / "a").read_bytes())

    return Compressor(compress, decompress)


def _by_program(program: str, raw: Bytes) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "a").write_bytes(raw.tobytes())
        command = [program, "a", "-mx=9", "-mmt=1", "-bd", "a.7z", "a"]
        subprocess.run(command, cwd=scratch, check=True, capture_output=True)
        return (Path(scratch) / "a.7z").read_bytes()


def _undo_program(program: str, packed: bytes) -> Bytes:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "a.7z").write_bytes(packed)
        subprocess.run([program, "x", "-mmt=1", "a.7z"], cwd=scratch, check=True, capture_output=True)
        return _bytes((Path(scratch) / "a").read_bytes())


def pcodec(level: int) -> Compressor:
    """Return pcodec on the bytes as 32-bit numbers.

    Raises
    ------
    ImportError
        It is not installed.
    """
    from pcodec import ChunkConfig, standalone

    config = ChunkConfig(compression_level=level)

    def decompress(packed: bytes) -> Bytes:
        values: NDArray[Any] = standalone.simple_decompress(packed)
        return values.view(np.uint8)

    return Compressor(lambda raw: standalone.simple_compress(raw.view(np.float32), config), decompress)


def pcodec_integers(level: int) -> Compressor:
    """Return pcodec on 32-bit integers, for differences, which are no floats any more."""
    from pcodec import ChunkConfig, standalone

    config = ChunkConfig(compression_level=level)
    plain = pcodec(level)
    return Compressor(lambda raw: standalone.simple_compress(raw.view(np.uint32), config), plain.decompress)


def zipnn() -> Compressor:
    """Return ZipNN for float32, one thread.

    Raises
    ------
    ImportError
        It is not installed.
    """
    from zipnn import ZipNN

    coder = ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
    return Compressor(
        lambda raw: bytes(coder.compress(raw.tobytes())), lambda packed: _bytes(coder.decompress(packed))
    )


def _bytes(raw: bytes) -> Bytes:
    values: Bytes = np.frombuffer(raw, np.uint8)
    return values


def xor(raw: Bytes, previous: Bytes) -> Bytes:
    """Return the bits that changed; its own inverse."""
    return raw ^ previous


def difference(raw: Bytes, previous: Bytes) -> Bytes:
    """Return the difference byte by byte, modulo 256."""
    return raw - previous
