"""Names and keys at random: every tensor file has one fate, and success means that nothing was left out."""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.errors import InshrinkError
from tests.formats.layouts.builders import GPT, adam, average, copy, critic, gpt, half, save, save_tensors
from tests.formats.layouts.files import fates_of, tensor_files

LEFT_OUT = {"left out", "unreadable"}
EXACT = ("--codec", "lossless", "--optimizer", "exact", "--quiet")
ARCHIVED = {"step", "auxiliary", "branch"}

FOLDERS = ("", "", "", "ckpts/", "version_0/", "version_1/", "seed_0/epoch=1-val/", "a/b/c/d/e/", "10/")
FOLDERS += ("best/",)
WORDS = ("model", "ckpt", "checkpoint", "epoch", "step", "G", "D", "optimizer", "best", "last", "final")
WORDS += ("ema", "net_G", "model_final", "optimal", "")
COUNTERS = ("", "1", "2", "3", "10", "000100", "1_500", "2_1000", "e1_s20", "1k", "1.5M", "2e3", "rank0")
COUNTERS += ("100_rank1", "2024-05-12_13-45-50", "Feb01_00-10-00", "acc0.91", "epoch=1-step=20")
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pth.tar", ".th")
STEP_KEYS = ("step", "epoch", "global_step", "iteration", "num_updates")

names = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(FOLDERS),
    st.sampled_from(WORDS),
    st.sampled_from(("_", "-", "")),
    st.sampled_from(COUNTERS),
    st.sampled_from(SUFFIXES),
).filter(lambda name: not Path(name).name.startswith((".", "-", "_")))

kinds = st.sampled_from(("state dict", "model", "training", "average", "half", "optimizer", "other", "copy"))

files = st.dictionaries(
    names,
    st.tuples(
        kinds, st.integers(0, 40), st.sampled_from(STEP_KEYS), st.sampled_from((None, None, None, 0.5))
    ),
    min_size=1,
    max_size=6,
)


def _value(kind, step, key):
    model = gpt(step)
    return {
        "state dict": model,
        "model": {"model": model, key: step},
        "training": {"model": model, "optimizer": adam(GPT, step), key: step},
        "average": {"model": model, "ema": average(model), key: step},
        "half": half(model),
        "optimizer": adam(GPT, step),
        "other": critic(step),
        "copy": model,
    }[kind]


def write(folder, drawn):
    """Write the files of a drawn run; a fraction cuts a file off."""
    written: list[Path] = []
    for name, (kind, step, key, cut) in drawn.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "copy" and written and written[0].suffix == path.suffix:
            copy(written[0], path)
        elif path.suffix == ".safetensors":
            save_tensors(path, half(gpt(step)) if kind == "half" else gpt(step))
        else:
            save(path, _value(kind, step, key))
        written.append(path)
        if cut is not None:
            path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])


@given(drawn=files)
@example(drawn={"net.pt": ("state dict", 1, "step", None), "a/b/c/d/e/best2e3.th": ("half", 2, "step", None)})
@example(
    drawn={"checkpoint.safetensors": ("state dict", 1, "step", None), "10.th": ("optimizer", 1, "step", None)}
)
@example(
    drawn={
        "version_0/100_rank1.pt": ("training", 6, "num_updates", None),
        "model_final_1_500.pt": ("copy", 6, "step", None),
        "best/model_1.bin": ("average", 38, "step", None),
    }
)
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # each example compresses a run: to shrink one takes minutes
    suppress_health_check=list(HealthCheck),
)
def test_every_tensor_file_has_one_fate_and_success_means_that_none_was_left_out(drawn):
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "run"
        write(folder, drawn)
        of_tensors = {*tensor_files(folder), *(name for name, row in drawn.items() if row[-1] is not None)}
        code = main(["compress", str(folder), "-o", f"{above}/a.inshrink", *EXACT])
        try:
            run = inshrink_core.open(folder)
        except InshrinkError:
            assert code != 0
            return
        fates = {path: fates_of(run, path) for path in of_tensors}
        assert not {path: found for path, found in fates.items() if len(found) != 1}
        fate = {path: str(one.fate) for path, (one,) in fates.items()}
        assert {one.step for (one,) in fates.values() if one.fate == "step"} <= set(run.steps)
        archived = {(folder / path).read_bytes() for path, one in fate.items() if one in ARCHIVED}
        assert not [
            path
            for path, one in fate.items()
            if one == "duplicate" and (folder / path).read_bytes() not in archived
        ]
        if code == 0:
            assert not LEFT_OUT & set(fate.values())
            inshrink_core.restore(f"{above}/a.inshrink", f"{above}/out", every=True)
            back = {path.read_bytes() for path in Path(f"{above}/out").rglob("*") if path.is_file()}
            of_steps = [path for path, one in fate.items() if one in ("step", "auxiliary")]
            assert not [path for path in of_steps if (folder / path).read_bytes() not in back]
