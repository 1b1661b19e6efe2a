"""Fine-tunes kept bit for bit, beside rivals and their entropy: ``python -m benchmarks.exact``.

A character GPT learns the documentation and is fine-tuned on source code with AdamW, float32 masters, three
learning rates; it is saved nine times, 1, 5 and 50 steps apart, which makes eight deltas. The weights are
those in bfloat16, as post-training publishes them; of the saves 5 steps apart also float16 and float32 ones,
and Adam's moments. Contexts were tuned on the model of 0.36 M parameters and its learning rates (``tuned``);
the one of 2.4 M parameters with others judges.

========================= ====================================================================================
method                    what it is
========================= ====================================================================================
lossless                  ours, a block a tensor
xor, zstd -3 or -19       exclusive or with the save before, all tensors as one string
gaps, values, zstd -3     a sparse patch as PULSE publishes them: places that changed as gaps, new values
BitX                      exclusive or, planes of bytes, zstd -3
conditional entropy       the bound: of each tensor's tokens, given history and exponent, and the bits below
========================= ====================================================================================

Speed is that of one thread over the save as one string, exclusive or and planes included, the best of three.
ZipNN is in no table: there is no wheel of it for this Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.results import write
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.codecs.exact import decode_exact, encode_exact
from inshrink_core.coding.changes import plan_changes
from inshrink_core.lab.tasks.char_finetune import encode_sources
from inshrink_core.lab.tasks.char_gpt import CharGPT
from inshrink_core.lab.tasks.characters import encode_corpus, sample_windows
from inshrink_core.ops.changes import N_PLACES, find_contexts

APART = (1, 5, 50)
N_DELTAS = 8
FIRST = 20
"""Steps before the first save: the warm-up."""

_PRETRAINING = 300
_BATCH = 8
_CONTEXT = 64
_MANTISSAS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
_WORDS = {2: torch.int16, 4: torch.int32}
_ROUNDS = 3

Words = NDArray[Any]
Save = dict[str, dict[str, Tensor]]
"""Tensors by what they are (weights, exp_avg, exp_avg_sq) and name."""


class Setting(NamedTuple):
    """A model, and the learning rates it is fine-tuned with."""

    role: str
    width: int
    heads: int
    rates: tuple[float, ...]


SETTINGS = (
    Setting("tuned", 96, 3, (3e-4, 3e-5, 3e-6)),
    Setting("judged", 256, 8, (1e-4, 1e-5, 1e-6)),
)


def fine_tunes(setting: Setting) -> Iterator[tuple[float, dict[int, Save]]]:
    """Yield each learning rate with its saves by step."""
    text, _, n_characters = encode_corpus()
    sources, _ = encode_sources()
    torch.manual_seed(5)
    model = CharGPT(n_characters, width=setting.width, depth=3, heads=setting.heads, context=_CONTEXT)
    for _ in _trained(model, text, 2e-3, _PRETRAINING, 1):
        pass
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = {FIRST + apart * i for apart in APART for i in range(N_DELTAS + 1)}
    for rate in setting.rates:
        model.load_state_dict(start)
        steps = enumerate(_trained(model, sources, rate, max(wanted), 2), 1)
        yield rate, {step: _saved(model, optimizer) for step, optimizer in steps if step in wanted}


def _trained(
    model: nn.Module, tokens: Tensor, rate: float, n_steps: int, seed: int
) -> Iterator[torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(1, n_steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / FIRST)
        generator = torch.Generator().manual_seed(100_000 * seed + step)
        inputs, targets = sample_windows(tokens, _BATCH, _CONTEXT, generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield optimizer


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    state, named = optimizer.state, list(model.named_parameters())
    moments = {
        kind: {name: state[p][kind].clone() for name, p in named} for kind in ("exp_avg", "exp_avg_sq")
    }
    return {"weights": {name: p.detach().clone() for name, p in named}, **moments}


class Method(NamedTuple):
    """Two functions of a save's words and those of the save before; the second returns the first."""

    pack: Callable[[Words, Words], bytes]
    unpack: Callable[[bytes, Words], Words]


def xor_zstd(level: int) -> Method:
    """Return exclusive or and zstd."""
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Method(
        lambda now, before: packer.compress((now ^ before).tobytes()),
        lambda packed, before: np.frombuffer(unpacker.decompress(packed), before.dtype) ^ before,
    )


def bitx(level: int) -> Method:
    """Return exclusive or, planes of bytes and zstd."""
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def pack(now: Words, before: Words) -> bytes:
        turned = (now ^ before).view(np.uint8).reshape(now.size, -1)
        return packer.compress(np.ascontiguousarray(turned.T).tobytes())

    def unpack(packed: bytes, before: Words) -> Words:
        planes = np.frombuffer(unpacker.decompress(packed), np.uint8).reshape(-1, before.size)
        words: Words = np.ascontiguousarray(planes.T).reshape(-1).view(before.dtype) ^ before
        return words

    return Method(pack, unpack)


def sparse_patch(level: int) -> Method:
    """Return gaps between places that changed in seven bits a byte, the new values, and zstd of both."""
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def pack(now: Words, before: Words) -> bytes:
        places = np.flatnonzero(now != before)
        gaps = np.diff(places, prepend=-1) - 1
        coded = packer.compress(_varints(gaps).tobytes())
        return len(coded).to_bytes(8, "little") + coded + packer.compress(now[places].tobytes())

    def unpack(packed: bytes, before: Words) -> Words:
        end = 8 + int.from_bytes(packed[:8], "little")
        places = np.cumsum(_gaps(np.frombuffer(unpacker.decompress(packed[8:end]), np.uint8)) + 1) - 1
        words = before.copy()
        words[places] = np.frombuffer(unpacker.decompress(packed[end:]), before.dtype)
        return words

    return Method(pack, unpack)


def _varints(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return numbers below 2**28, least significant seven bits first."""
    sevens = values[:, None] >> np.arange(0, 28, 7)
    length = 1 + (sevens[:, 1:] > 0).sum(1)
    more = np.arange(4) < length[:, None] - 1
    coded = ((sevens & 127) | more << 7).astype(np.uint8)
    kept: NDArray[np.uint8] = coded[np.arange(4) < length[:, None]]
    return kept


def _gaps(coded: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Undo `_varints`."""
    starts = np.flatnonzero(np.concatenate(([True], coded[:-1] < 128)))[: coded.size]
    if not starts.size:
        return np.zeros(0, np.int64)
    within = np.arange(coded.size) - np.repeat(starts, np.diff(starts, append=coded.size))
    gaps: NDArray[np.int64] = np.add.reduceat((coded & 127).astype(np.int64) << 7 * within, starts)
    return gaps


RIVALS: dict[str, Callable[[], Method]] = {
    "xor, zstd -3": lambda: xor_zstd(3),
    "xor, zstd -19": lambda: xor_zstd(19),
    "gaps, values, zstd -3": lambda: sparse_patch(3),
    "BitX": lambda: bitx(3),
}


def rival_row(name: str, strings: list[Words]) -> dict[str, object]:
    """Return ratio and speeds of a rival."""
    method, seconds = RIVALS[name](), [[0.0, 0.0] for _ in range(1 if "19" in name else _ROUNDS)]
    for taken in seconds:
        n_bytes = 0
        for before, now in pairwise(strings):
            begun = time.perf_counter()
            packed = method.pack(now, before)
            middle = time.perf_counter()
            unpacked = method.unpack(packed, before)
            taken[0], taken[1] = taken[0] + middle - begun, taken[1] + time.perf_counter() - middle
            n_bytes += len(packed)
            if not np.array_equal(unpacked, now):
                raise ValueError(f"{name} does not return what it was given")
    return _row(name, strings, n_bytes, seconds)


def _row(
    name: str, strings: list[Words], n_bytes: int, seconds: list[list[float]] | None = None
) -> dict[str, object]:
    raw = N_DELTAS * strings[0].nbytes
    row: dict[str, object] = {"method": name, "bytes": n_bytes, "ratio": round(raw / n_bytes, 3)}
    if seconds is not None:
        best = np.array(seconds).min(0)
        row |= {"encode_mb_per_s": round(raw / 1e6 / best[0]), "decode_mb_per_s": round(raw / 1e6 / best[1])}
    return row


def _spec(tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name="w", role=TensorRole.WEIGHT, dtype=dtype, shape=tuple(tensor.shape))


def own_bytes(saves: list[dict[str, Tensor]]) -> tuple[int, int]:
    """Return the bytes of the deltas and of the first save, tensor by tensor."""
    first = deltas = 0
    for name in saves[0]:
        reference: TensorReference | None = None
        for i, save in enumerate(saves):
            block, reference = encode_exact(_spec(save[name]), save[name], reference)
            first, deltas = (
                (first, deltas + len(block.payload)) if i else (len(block.payload) + first, deltas)
            )
    return deltas, first


def own_seconds(strings: list[Tensor]) -> list[list[float]]:
    """Return how long our deltas of whole saves take, to encode and to decode, by round."""
    seconds = [[0.0, 0.0] for _ in range(_ROUNDS)]
    spec = _spec(strings[0])
    for taken in seconds:
        encoder = decoder = encode_exact(spec, strings[0], None).reference
        for string in strings[1:]:
            begun = time.perf_counter()
            block, encoder = encode_exact(spec, string, encoder, owned=True)
            middle = time.perf_counter()
            decoded, decoder = decode_exact(spec, block.payload, decoder)
            taken[0], taken[1] = taken[0] + middle - begun, taken[1] + time.perf_counter() - middle
            if not torch.equal(_words(decoded), _words(string)):
                raise ValueError("a delta does not return what it was given")
    return seconds


def entropy_bytes(saves: list[dict[str, Tensor]]) -> int:
    """Return the empirical conditional entropy of the deltas and the bits below them, tensor by tensor."""
    identity, bits = torch.arange(N_PLACES, dtype=torch.int16), 0.0
    for name in saves[0]:
        history = None
        for before, now in pairwise(save[name] for save in saves):
            words, earlier = _words(now), _words(before)
            plan = plan_changes(words, earlier, history, _MANTISSAS[now.dtype])
            places = find_contexts(earlier, history, identity, plan.rule).numpy().astype(np.int64)
            pairs = np.bincount(256 * places + plan.changes.tokens.numpy(), minlength=256 * N_PLACES)
            counts = pairs.reshape(N_PLACES, 256).astype(np.float64)
            bits += _bits_of(counts.sum(1)) - _bits_of(counts) + 32 * plan.changes.extra.size
            history = plan.changes.history
    return round(-(-bits // 8))


def _bits_of(counts: NDArray[np.float64]) -> float:
    """Return the sum of c log2 c."""
    some = counts[counts > 0]
    return float((some * np.log2(some)).sum())


def _words(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_WORDS[tensor.element_size()])


def rows_of(saves: list[dict[str, Tensor]]) -> Iterator[dict[str, object]]:
    """Yield the rows of a chain of saves."""
    tensors = [torch.cat([tensor.reshape(-1) for tensor in save.values()]) for save in saves]
    strings = [_words(tensor).numpy() for tensor in tensors]
    changed = float(np.mean([np.mean(now != before) for before, now in pairwise(strings)]))
    about = {"changed": round(changed, 4), "raw_bytes": N_DELTAS * strings[0].nbytes}
    deltas, first = own_bytes(saves)
    own = _row("lossless", strings, deltas, own_seconds(tensors))
    yield {**about, **own, "ratio_of_first": round(strings[0].nbytes / first, 3)}
    for name in RIVALS:
        yield {**about, **rival_row(name, strings)}
    yield {**about, **_row("conditional entropy", strings, entropy_bytes(saves))}


def cases(saves: dict[int, Save]) -> Iterator[tuple[str, int, list[dict[str, Tensor]]]]:
    """Yield what is stored, how many steps apart, and the saves."""
    kinds = [("weights", torch.bfloat16, apart) for apart in APART]
    kinds += [("weights", torch.float16, 5), ("weights", torch.float32, 5)]
    kinds += [("exp_avg", torch.float32, 5), ("exp_avg_sq", torch.float32, 5)]
    for what, dtype, apart in kinds:
        chain = [saves[FIRST + apart * i][what] for i in range(N_DELTAS + 1)]
        named = f"{what} {str(dtype).removeprefix('torch.')}"
        yield named, apart, [{name: one.to(dtype) for name, one in save.items()} for save in chain]


def main() -> None:
    """Train, measure and write ``results/exact.csv``."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for setting in SETTINGS:
        for rate, saves in fine_tunes(setting):
            for what, apart, chain in cases(saves):
                about = {"set": setting.role, "rate": rate, "what": what, "steps_apart": apart}
                rows += ({**about, **row} for row in rows_of(chain))
                print(rows[-6], rows[-1]["ratio"], flush=True)
    write("exact", rows)


if __name__ == "__main__":
    main()
