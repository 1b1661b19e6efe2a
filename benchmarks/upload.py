"""How fast frames come into a bucket, against obstore alone with the same bytes.

Each row uploads frames of one size to moto, a server of S3 on this machine, by turns: by obstore alone, one
``put`` after the other with its own pieces for large ones; by an archive's uploads, of frames that lie on the
disk, each created under a condition, and of a manifest, replaced by its tag; and by an archive's writer, with
all it does before: each frame and each manifest made durable on the local disk. Shares are medians of
obstore's seconds over ours, round by round: 1 is as fast. Needs obstore and ``moto[server]``. Written to
``results/upload.csv``.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.results import write
from inshrink_core.archive.storage import storage_at
from inshrink_core.archive.storage.behind import WAITING_VARIABLE, waiting_folder
from inshrink_core.archive.storage.objects import LARGE_NBYTES, make_store

SIZES = ((100_000, 60), (4 << 20, 12), (64 << 20, 2), (LARGE_NBYTES + (8 << 20), 1))
"""Bytes of a frame, and frames."""

N_ROUNDS = 5
_MANIFEST_NBYTES = 2_000
WAYS = ("obstore", "upload", "writer")


def alone(bucket: str, frames: list[Path]) -> float:
    """Seconds that obstore takes for files."""
    store, folder = make_store("s3", bucket), uuid.uuid4().hex
    begun = time.perf_counter()
    for frame in frames:
        store.put(f"{folder}/{frame.name}", frame)
    return time.perf_counter() - begun


def archived(bucket: str, frames: list[bytes], *, upload: bool) -> float:
    """Seconds until the bucket has frames and lists them, from the disk on or from the start."""
    url = f"s3://{bucket}/{uuid.uuid4().hex}"
    storage = storage_at(url).written()
    lock = storage.lock()
    storage.recover(("", "frames"))
    if upload:
        lock.release()  # nothing is uploaded any more
        lock = storage.lock()
    begun, tag = time.perf_counter(), None
    for number, frame in enumerate(frames):
        with storage.create(f"frames/{number:08}-{number}.frame") as file:
            file.write(frame)
            file.commit()
        storage.sync("frames")
        tag = storage.replace("inshrink-manifest", os.urandom(_MANIFEST_NBYTES), tag)
    if upload:
        lock.release()
        storage = storage_at(url).written()
        lock, begun = storage.lock(), time.perf_counter()
        storage.recover(("", "frames"))
    storage.flush()
    took = time.perf_counter() - begun
    lock.release()
    shutil.rmtree(waiting_folder(url))
    return took


def main() -> None:
    """Measure every size, by turns."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.integrations.servers import make_bucket, moto

    rows: list[dict[str, object]] = []
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
            rounds = []
            for turn in range(N_ROUNDS + 1):
                took = {}
                for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                    if way == "obstore":
                        took[way] = alone("bench", files)
                    else:
                        took[way] = archived("bench", contents, upload=way == "upload")
                rounds.append(took)
                empty()
            rounds = rounds[1:]  # the first warms up
            row: dict[str, object] = {"frame_bytes": nbytes, "frames": n_frames, "rounds": N_ROUNDS}
            for way in WAYS:
                row[f"{way}_seconds"] = round(statistics.median(took[way] for took in rounds), 4)
            for way in WAYS[1:]:
                shares = sorted(took["obstore"] / took[way] for took in rounds)
                row[f"{way}_share"] = round(statistics.median(shares), 3)
                row[f"{way}_share_min"], row[f"{way}_share_max"] = round(shares[0], 3), round(shares[-1], 3)
            rows.append(row)
            print(row, flush=True)
            write("upload", rows)
            for file in files:
                file.unlink()


def empty() -> None:
    """Have the server forget what it holds in memory."""
    store = make_store("s3", "bench")
    for listed in store.list():
        store.delete([one["path"] for one in listed])


if __name__ == "__main__":
    main()
