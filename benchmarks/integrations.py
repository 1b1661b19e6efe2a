"""What archiving costs a training with Hugging Face or Lightning, against the plain library.

Each row compares a library with Inshrink to the same library without, in the same process: how long
training stands still for a save, which share of the training that is, and how many bytes a save takes. Of
stalls, ``cpu`` is the processor time of the training's thread: what a busy machine adds is not in it. Needs
the extras ``hf`` and ``lightning``. Written to ``results/integrations.csv``.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import inshrink_core
from benchmarks.results import renew
from inshrink_core.chain import Archive
from inshrink_core.training import FolderSaver

N_STEPS, SAVE_EVERY = 30, 10
N_SAVES = 9
N_UNDER_BUDGET, N_WHOLE = 32, 2
BUDGET = 500_000
"""Bytes a save; a delta of everything takes 2 MB."""


class Spent(NamedTuple):
    """Seconds that some work took: on the clock, and of this thread's processor time."""

    wall: float
    cpu: float


def spent(work: Callable[[], object]) -> Spent:
    """Time some work."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Spent(time.perf_counter() - wall, time.thread_time() - cpu)


def language_model() -> Any:
    """A Llama of 3.7 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, num_attention_heads=4, num_key_value_heads=4, **sizes)
    )


def tokens() -> list[dict[str, torch.Tensor]]:
    """Rows of a language with a pattern to learn."""
    rows = []
    for seed in range(256):
        first = torch.randint(0, 1024, (1,), generator=torch.Generator().manual_seed(seed))
        row = (first + 7 * torch.arange(64)) % 1024
        rows.append({"input_ids": row, "labels": row})
    return rows


def nbytes_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Timed:
    """Adds up the time that calls of one function take."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.times = function, list[Spent]()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(spent(lambda: self._function(*args, **kwargs)))

    @property
    def wall(self) -> float:
        """All of them, on the clock."""
        return sum(one.wall for one in self.times)


def hugging_face(work: Path) -> Iterator[dict[str, object]]:
    """A Trainer with the callback and without."""
    from transformers import Trainer, TrainingArguments

    from inshrink_core.integrations.huggingface import InshrinkCallback

    def train(name: str, callbacks: list[Any]) -> tuple[float, Any]:
        arguments = TrainingArguments(
            output_dir=str(work / name),
            max_steps=N_STEPS,
            save_steps=SAVE_EVERY,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_total_limit=1 if callbacks else None,
        )
        trainer = Trainer(language_model(), arguments, train_dataset=tokens(), callbacks=callbacks)
        trainer._save_checkpoint = Timed(trainer._save_checkpoint)
        return spent(trainer.train).wall, trainer

    plain_seconds, plain = train("plain", [])
    callback = InshrinkCallback(work / "hf.inshrink")
    callback.on_save = Timed(callback.on_save)
    callback.on_train_end = Timed(callback.on_train_end)
    ours_seconds, _ = train("ours", [callback])
    stalls = callback.on_save
    callback.close(strict=True)
    training = ours_seconds - callback.on_train_end.wall
    yield stall_row("huggingface", "stall of a save", stalls.times, plain._save_checkpoint.times, 5.0)
    yield row("huggingface", "summed stalls over wall time", "%", 100 * stalls.wall / training, None, 0.5)
    yield row("huggingface", "wall time with the last archived", "s", ours_seconds, plain_seconds, None)
    archive = Archive.open(work / "hf.inshrink")
    frames = archive.reader.frames
    raw = nbytes_of(work / "plain" / f"checkpoint-{frames[-1].step}")
    deltas = [frame.nbytes for frame in frames[1:]]
    yield row("huggingface", "bytes of a delta", "bytes", statistics.mean(deltas), raw, None)
    yield row(
        "huggingface", "ratio of a delta, optimizer included", "", raw / statistics.mean(deltas), None, 17.0
    )


def folders(work: Path) -> Iterator[dict[str, object]]:
    """`FolderSaver.save` of a folder with model and optimizer, against `torch.save` of the same."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(
        input_ids=torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)
    ).loss.backward()
    optimizer.step()
    saves, plain = [], []
    with FolderSaver(work / "folders.inshrink") as saver:
        for step in range(1, N_SAVES + 1):
            folder = work / f"checkpoint-{step}"
            folder.mkdir()

            def write_plain(folder: Path = folder) -> None:
                torch.save(model.state_dict(), folder / "pytorch_model.bin")
                torch.save(optimizer.state_dict(), folder / "optimizer.pt")

            plain.append(spent(write_plain))
            saves.append(spent(lambda folder=folder, step=step: saver.save(folder, step)))
            saver.flush(strict=True)
            shutil.rmtree(folder)
    yield stall_row("folder", "stall of a save", saves, plain, 5.0)


def lightning(work: Path) -> Iterator[dict[str, object]]:
    """A `CheckpointIO` of a state of Lightning, against Lightning's own."""
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from inshrink_core.integrations.lightning import InshrinkCheckpointIO

    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(
        input_ids=torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)
    ).loss.backward()
    optimizer.step()
    ours, own = InshrinkCheckpointIO(work / "pl.inshrink"), TorchCheckpointIO()
    times: dict[str, list[Spent]] = {"ours": [], "own": []}
    for step in range(1, N_SAVES + 1):
        state = {
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "global_step": step,
        }
        times["own"].append(spent(lambda s=state, n=step: own.save_checkpoint(s, work / f"own-{n}.ckpt")))
        times["ours"].append(spent(lambda s=state, n=step: ours.save_checkpoint(s, work / f"{n}.ckpt")))
        ours._saver.flush(strict=True)
    ours.close(strict=True)
    yield stall_row("lightning", "stall of a save", times["ours"], times["own"], None)


def training() -> tuple[Any, Any, Callable[[], None], Callable[[], None]]:
    """A model, its optimizer, and functions for forward and backward of a step, and for the step."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.stack([one["input_ids"] for one in tokens()[:8]])

    def differentiate() -> None:
        optimizer.zero_grad()
        model(input_ids=data, labels=data).loss.backward()

    def step() -> None:
        differentiate()
        optimizer.step()

    step()
    return model, optimizer, differentiate, step


def savers(work: Path) -> Iterator[dict[str, object]]:
    """`Saver.save` with and without `wait`, against `torch.save` of the same state."""
    model, optimizer, differentiate, step = training()
    plain, steps, stalls, waits = [], [], defaultdict(list), []
    with inshrink_core.Saver(work / "saver.inshrink", model, optimizer) as saver:
        for number in range(1, 2 * N_SAVES + 1):
            plain.append(
                spent(
                    lambda: torch.save(
                        {"m": model.state_dict(), "o": optimizer.state_dict()}, work / "plain.pt"
                    )
                )
            )
            steps.append(spent(step))
            wait = number % 2 == 0
            stalls[wait].append(spent(lambda n=number, w=wait: saver.save(n, wait=w)))
            differentiate()
            if not wait:
                waits.append(spent(saver.before_step))
            optimizer.step()
            saver.flush()
    lazy, torch_save = (statistics.median(one.wall for one in held) for held in (stalls[False], plain))
    yield stall_row("saver", "stall of a save", stalls[True], plain, None)
    yield stall_row("saver, wait=False", "stall of a save", stalls[False], plain, 1e3 * torch_save / 20)
    yield stall_row("saver, wait=False", "wait of the next step", waits, None, None)
    share = 100 * lazy / statistics.median(one.wall for one in steps)
    yield row("saver, wait=False", "stall of a save over a step", "%", share, None, 1.0)


def budgets(work: Path) -> Iterator[dict[str, object]]:
    """A save under a budget after every step; the first ones, which are whole or measure, are left out."""
    model, optimizer, _, step = training()
    steps, stalls = [], []
    with inshrink_core.Saver(work / "budget.inshrink", model, optimizer) as saver:
        for number in range(1, N_UNDER_BUDGET + 1):
            steps.append(spent(step))
            budget = None if number <= N_WHOLE else BUDGET
            stalls.append(spent(lambda n=number, b=budget: saver.save(n, wait=False, budget=b)))
    held, trained = stalls[N_WHOLE + 1 :], steps[N_WHOLE + 1 :]
    stalled = sum(one.wall for one in held)
    share = 100 * stalled / (stalled + sum(one.wall for one in trained))
    yield stall_row("saver, a budget every step", "stall of a save", held, None, None)
    yield row("saver, a budget every step", "summed stalls over wall time", "%", share, None, 5.0)
    frames = Archive.open(work / "budget.inshrink").reader.frames
    taken = statistics.mean(frame.nbytes for frame in frames[N_WHOLE:])
    yield row("saver, a budget every step", "bytes of a save", "bytes", taken, None, BUDGET)


def row(
    library: str, what: str, unit: str, value: float, plain: float | None, target: float | None
) -> dict[str, object]:
    """One figure, what the plain library took, and what was aimed at."""
    return {"library": library, "what": what, "unit": unit, "value": value, "plain": plain, "target": target}


def stall_row(
    library: str, what: str, times: list[Spent], plain: list[Spent] | None, target: float | None
) -> dict[str, object]:
    """How long training stands still: the median, and the least, which busy cores do not reach."""
    own, other = ([1e3 * one.wall for one in held or []] for held in (times, plain))
    median = statistics.median(other) if other else None
    found = row(library, what, "ms", statistics.median(own), median, target)
    cpu = 1e3 * statistics.median(one.cpu for one in times)
    return found | {"least": min(own), "plain_least": min(other, default=None), "cpu": cpu}


PARTS = {
    "folders": folders,
    "huggingface": hugging_face,
    "lightning": lightning,
    "saver": savers,
    "budget": budgets,
}


def main() -> None:
    """Measure the parts named on the command line, or all of them."""
    for name in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            rows = list(PARTS[name](Path(folder)))
        for one in rows:
            print(one, flush=True)
        renew("integrations", rows, ["library", "what"])


if __name__ == "__main__":
    main()
