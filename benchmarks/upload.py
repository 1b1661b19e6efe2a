"""How fast frames come into a bucket, against obstore alone with the same bytes.

Each row uploads frames of one size to moto, a server of S3 on this machine, by turns: by obstore alone, one
``put`` after the other with its own pieces for large ones, and by an archive's writer, which makes each frame
durable on the local disk first, creates it under a condition, and replaces a manifest by its tag after each.
``share`` is the median of obstore's seconds over ours, round by round: 1 is as fast.
Needs obstore and ``moto[server]``. Written to ``results/upload.csv``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.results import write
from inshrink_core.archive.storage import storage_at
from inshrink_core.archive.storage.behind import WAITING_VARIABLE
from inshrink_core.archive.storage.objects import LARGE_NBYTES, make_store

SIZES = ((100_000, 60), (4 << 20, 12), (64 << 20, 3), (LARGE_NBYTES + (64 << 20), 1))
"""Bytes of a frame, and frames."""

N_ROUNDS = 7
_MANIFEST_NBYTES = 2_000


def alone(bucket: str, frames: list[Path]) -> float:
    """Seconds that obstore takes for files."""
    store, folder = make_store("s3", bucket), uuid.uuid4().hex
    begun = time.perf_counter()
    for frame in frames:
        store.put(f"{folder}/{frame.name}", frame)
    return time.perf_counter() - begun


def archived(bucket: str, frames: list[bytes]) -> float:
    """Seconds until frames that a writer commits are in the bucket, and the manifest lists them."""
    storage = storage_at(f"s3://{bucket}/{uuid.uuid4().hex}").written()
    lock = storage.lock()
    try:
        storage.recover(("", "frames"))
        tag = None
        begun = time.perf_counter()
        for number, frame in enumerate(frames):
            with storage.create(f"frames/{number:08}-{number}.frame") as file:
                file.write(frame)
                file.commit()
            storage.sync("frames")
            tag = storage.replace("inshrink-manifest", os.urandom(_MANIFEST_NBYTES), tag)
        storage.flush()
        return time.perf_counter() - begun
    finally:
        lock.release()


def main() -> None:
    """Measure every size, by turns."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.integrations.servers import make_bucket, moto

    rows = []
    with moto() as address, tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address, WAITING_VARIABLE: f"{folder}/waiting",
        }  # fmt: skip
        make_bucket(address, "bench")
        for nbytes, n_frames in SIZES:
            contents = [os.urandom(nbytes) for _ in range(n_frames)]
            files = [Path(folder, f"{nbytes}-{i}") for i in range(n_frames)]
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(content)
            pairs = []
            for turn in range(N_ROUNDS + 1):
                took = {}
                for way in ("alone", "archived") if turn % 2 else ("archived", "alone"):
                    took[way] = alone("bench", files) if way == "alone" else archived("bench", contents)
                pairs.append((took["alone"], took["archived"]))
                empty()
            pairs = pairs[1:]  # the first warms up
            shares = [one / other for one, other in pairs]
            rows.append(
                {
                    "frame_bytes": nbytes,
                    "frames": n_frames,
                    "rounds": N_ROUNDS,
                    "obstore_seconds": statistics.median(one for one, _ in pairs),
                    "archive_seconds": statistics.median(other for _, other in pairs),
                    "share": statistics.median(shares),
                    "share_min": min(shares),
                    "share_max": max(shares),
                }
            )
            print(rows[-1], flush=True)
            for file in files:
                file.unlink()
    write("upload", rows)


def empty() -> None:
    """Have the server forget what it holds in memory."""
    store = make_store("s3", "bench")
    for listed in store.list():
        store.delete([one["path"] for one in listed])


if __name__ == "__main__":
    main()
