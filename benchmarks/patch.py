"""Patches of fine-tunes beside what else one could send: ``python -m benchmarks.patch``.

The character GPT of `benchmarks.exact` and its fine-tunes, 0.36 M parameters, three learning rates, saved
nine times 1, 5 and 50 steps apart, the weights as bfloat16; of those 5 apart as float16 and float32, too.
What is compared are files: the safetensors file of the later save, and

===================== ========================================================================================
method                what it is
===================== ========================================================================================
patch                 `inshrink export --patch`, header, index and checksums included
full                  the file as it is
zstd -3 or -19        the file, compressed
xor, zstd -3 or -19   its exclusive or with the file before, compressed
gaps, values, zstd -3 a sparse patch as PULSE publishes them, without names, shapes or checksums
===================== ========================================================================================

Every patch is applied, and what comes of it compared, before it counts. Bytes are sums over eight patches;
`of_best` is those of the patch over those of the best of the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save

import inshrink_core
from benchmarks.exact import APART, FIRST, N_DELTAS, Save, Setting, Words, fine_tunes, sparse_patch
from benchmarks.results import write

SETTING = Setting("patch", 96, 3, (1e-4, 1e-5, 1e-6))

DTYPES = {torch.bfloat16: APART, torch.float16: (5,), torch.float32: (5,)}


def patched_nbytes(chain: list[dict[str, torch.Tensor]], folder: Path) -> int:
    """Return the bytes of all patches from save to save, once each has led to the very next save."""
    (folder / "run").mkdir()
    for step, weights in enumerate(chain):
        (folder / "run" / f"step_{step}.safetensors").write_bytes(save(weights))
    archive, patch, made = folder / "a.inshrink", folder / "patch", folder / "made"
    inshrink_core.compress(folder / "run", archive, codec="lossless")
    total = 0
    for step in range(1, len(chain)):
        pair = f"{step - 1}:{step}"
        total += inshrink_core.verbs.export_patch(archive, patch, patch=pair, force=True).nbytes
        before = folder / "run" / f"step_{step - 1}.safetensors"
        inshrink_core.verbs.apply(patch, before, made, force=True)
        found = load_file(made)
        if any(not torch.equal(found[name], one) for name, one in chain[step].items()):
            raise ValueError(f"a patch does not lead to step {step}")
    return total


def others(chain: list[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Return the bytes of all else that one could send, by method."""
    files = [np.frombuffer(save(weights), np.uint8) for weights in chain]
    found = {"full": sum(file.nbytes for file in files[1:])}
    for level in (3, 19):
        packer = zstandard.ZstdCompressor(level=level)
        found[f"zstd -{level}"] = sum(len(packer.compress(file.tobytes())) for file in files[1:])
        turned = [(now ^ before).tobytes() for before, now in pairwise(files)]
        found[f"xor, zstd -{level}"] = sum(len(packer.compress(one)) for one in turned)
    sparse, words = sparse_patch(3), list(map(_words, chain))
    found["gaps, values, zstd -3"] = sum(len(sparse.pack(now, before)) for before, now in pairwise(words))
    return found


def _words(weights: dict[str, torch.Tensor]) -> Words:
    flat = torch.cat([one.reshape(-1) for one in weights.values()])
    return flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()]).numpy()


def rows_of(rate: float, saves: dict[int, Save]) -> Iterator[dict[str, object]]:
    """Yield the rows of a fine-tune."""
    for dtype, aparts in DTYPES.items():
        for apart in aparts:
            chosen = [saves[FIRST + apart * i]["weights"] for i in range(N_DELTAS + 1)]
            chain = [{name: one.to(dtype) for name, one in save.items()} for save in chosen]
            changed = np.mean([np.mean(now != old) for old, now in pairwise(map(_words, chain))])
            with tempfile.TemporaryDirectory() as folder:
                own, theirs = patched_nbytes(chain, Path(folder)), others(chain)
            best = min(theirs.values())
            about = {"rate": rate, "dtype": str(dtype).removeprefix("torch."), "steps_apart": apart}
            about |= {"changed": round(float(changed), 4), "of_best": round(own / best, 3)}
            for method, nbytes in {"patch": own, **theirs}.items():
                yield {**about, "method": method, "bytes": nbytes, "ratio": round(theirs["full"] / nbytes, 2)}


def main() -> None:
    """Train, measure and write ``results/patch.csv``."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for rate, saves in fine_tunes(SETTING):
        for row in rows_of(rate, saves):
            rows.append(row)
            if row["method"] == "patch":
                print(row, flush=True)
    write("patch", rows)


if __name__ == "__main__":
    main()
