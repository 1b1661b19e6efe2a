"""One step as one file: exact or as small as asked for, with what a model is loaded with."""

import json
from unittest.mock import Mock

import pytest
import torch

import inshrink_core
from inshrink_core.errors import ExistsError, InputError, NotFoundError
from inshrink_core.verbs.shared.values import matching_names


@pytest.fixture(scope="module")
def archive_path(run_path, tmp_path_factory):
    target = tmp_path_factory.mktemp("made") / "a.inshrink"
    inshrink_core.compress(run_path, target)
    return target


class Wide(torch.nn.Module):
    """A matrix large enough that headers do not count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(300, 128)
        torch.nn.init.normal_(self.embed.weight, std=0.05)
        self.fc = torch.nn.Linear(128, 300)
        self.norm = torch.nn.LayerNorm(128)
        self.register_buffer("count", torch.arange(5))


@pytest.fixture(scope="module")
def trainer_archive(tmp_path_factory):
    """Two checkpoint directories as trainers write them, with all that lies beside the weights."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("hf")
    network = Wide()
    for step in (10, 20):
        folder = root / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        with torch.no_grad():
            network.fc.weight += 0.01 * torch.randn(300, 128, generator=torch.Generator().manual_seed(step))
        save_file(network.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        optimizer = torch.optim.AdamW(network.parameters())
        (network.fc(network.norm(network.embed.weight)).square().sum()).backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "config.json").write_text('{"model_type": "wide"}')
        (folder / "tokenizer.json").write_text('{"vocabulary": ["a", "b"]}')
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for name in ("scheduler.pt", "rng_state.pth", "training_args.bin"):
            torch.save({"name": name}, folder / name)
    # Finer than any export that is asked for: what an archive left out, no export can bring back.
    inshrink_core.compress(root / "run", root / "a.inshrink", config={"coarseness": 0.5})
    return root / "a.inshrink"


def test_weights_only_are_at_least_eight_times_smaller_than_float32(trainer_archive, tmp_path):
    report = inshrink_core.verbs.export(trainer_archive, tmp_path / "m", weights_only=True)
    assert report.ratio_float32 is not None
    assert 8 <= report.ratio_float32 < 9
    assert not report.exact
    assert 0 < report.relative_error < 0.1
    loaded = inshrink_core.verbs.load_state_dict(tmp_path / "m")
    original = inshrink_core.verbs.load_state_dict(trainer_archive)
    error = (loaded["fc.weight"] - original["fc.weight"]).norm() / original["fc.weight"].norm()
    assert float(error) < 0.1
    assert torch.equal(loaded["count"], original["count"])


@pytest.mark.parametrize("ratio", [6.0, 10.0, 14.0])
def test_any_ratio_asked_for_is_reached_and_hardly_exceeded(trainer_archive, tmp_path, ratio):
    report = inshrink_core.verbs.export(trainer_archive, tmp_path / "m", weights_only=True, ratio=ratio)
    assert report.ratio_float32 is not None
    assert ratio <= report.ratio_float32 < 1.15 * ratio


def test_model_folder_has_config_and_tokenizer_and_no_training_state(trainer_archive, tmp_path):
    from safetensors.torch import load_file

    report = inshrink_core.verbs.export(trainer_archive, tmp_path / "m", step=20, weights_only=True)
    inshrink_core.restore(tmp_path / "m", tmp_path / "model", layout="safetensors")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert sorted(report.left_out) == [
        "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
    network = Wide()
    network.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    inshrink_core.restore(tmp_path / "m", tmp_path / "same")
    assert (tmp_path / "same" / "model.safetensors").exists()


def test_exporting_twice_gives_the_same_bytes(trainer_archive, tmp_path):
    for name in ("a", "b"):
        inshrink_core.verbs.export(trainer_archive, tmp_path / name, weights_only=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weights_only_export_is_compared_with_the_original_run(archive_path, run_path, tmp_path):
    inshrink_core.verbs.export(archive_path, tmp_path / "m", step=10, weights_only=True)
    verification = inshrink_core.verify(tmp_path / "m", against=inshrink_core.open(run_path / "step_10.pt"))
    assert verification.ok
    assert {row.step for row in verification.errors} == {10}


def test_export_refuses_what_makes_no_sense(archive_path, tmp_path):
    with pytest.raises(InputError, match="≥ 1"):
        inshrink_core.verbs.export(archive_path, tmp_path / "m", weights_only=True, ratio=0.5)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ExistsError):
        inshrink_core.verbs.export(archive_path, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    inshrink_core.verbs.export(archive_path, tmp_path / "there", force=True)
    assert inshrink_core.open(tmp_path / "there").steps == (45,)


def plain(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_layers_are_chosen_by_the_names_of_modules_and_globs_and_others_are_named(trainer_archive, tmp_path):
    def exported(**chosen):
        report = inshrink_core.verbs.export(
            trainer_archive, tmp_path / "m", weights_only=True, exact=True, force=True, **chosen
        )
        stored = set(inshrink_core.open(tmp_path / "m")[20])
        assert report.n_tensors == len(stored)
        return stored, sorted(report.to_json()["layers_left_out"])

    assert exported(without="fc") == ({"embed.weight", "norm.weight", "norm.bias", "count"}, ["fc"])
    left_out = ["count", "embed", "fc.bias", "norm.weight"]
    assert exported(tensors=["fc", "*.bias"], without="fc.bias") == ({"fc.weight", "norm.bias"}, left_out)
    with pytest.raises(NotFoundError, match="no tensor is left"):
        exported(tensors="q")

    restored = inshrink_core.restore(tmp_path / "m", tmp_path / "files", layout="safetensors")
    names = {path.name for path in restored.paths}
    assert "config.json" in names
    assert set(plain(tmp_path / "files" / "model.safetensors")) == {"fc.weight", "norm.bias"}


NAMES = ("ema.fc.w", "fc.w", "fc1.w", "fc1.b", "fc10.w", "gemma.w", "h[1].w", "h1.w", "a/b/c", "Schema.x")


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("fc1", "fc1.w fc1.b"),
        ("fc", "fc.w"),
        ("EMA", "ema.fc.w Schema.x"),
        ("c1", "fc1.w fc1.b fc10.w"),
        ("fc1*", "fc1.w fc1.b fc10.w"),
        ("*.b", "fc1.b"),
        ("h[1]", "h[1].w"),
        ("h[0-9].w", "h1.w"),
        (r"/fc\d+\.w/", "fc1.w fc10.w"),
        ("/^fc/", "fc.w fc1.w fc1.b fc10.w"),
        ("a/b/c", "a/b/c"),
        ("eaw", ""),
        ("", ""),
    ],
)
def test_a_name_goes_before_a_part_of_a_name_and_letters_apart_match_nothing(pattern, matches):
    assert matching_names(NAMES, pattern) == tuple(matches.split())


@pytest.mark.parametrize("pattern", ["/(/", "/a{99999999999}/", "/" + "(" * 5000 + "/"])
def test_a_regular_expression_that_cannot_be_read_is_refused(pattern):
    with pytest.raises(InputError, match="this regular expression cannot be read"):
        matching_names(NAMES, pattern)


def test_a_plain_file_loads_without_inshrink_and_has_the_values_of_the_packed_one(trainer_archive, tmp_path):
    packed = inshrink_core.verbs.export(trainer_archive, tmp_path / "m", weights_only=True, without="fc.bias")
    report = inshrink_core.verbs.export(
        trainer_archive,
        tmp_path / "m.safetensors",
        weights_only=True,
        without="fc.bias",
        layout="safetensors",
    )
    stored = plain(tmp_path / "m.safetensors")
    state = inshrink_core.verbs.load_state_dict(tmp_path / "m")
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    assert report.relative_error == pytest.approx(packed.relative_error, rel=1e-4)
    assert report.size is None
    assert report.nbytes == (tmp_path / "m.safetensors").stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {"m", "m.safetensors"}


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_floats_of_a_plain_file_become_what_is_asked_for(trainer_archive, tmp_path, word, dtype):
    report = inshrink_core.verbs.export(
        trainer_archive, tmp_path / "m", weights_only=True, exact=True, layout="safetensors", dtype=word
    )
    stored = plain(tmp_path / "m")
    assert stored["fc.weight"].dtype is dtype
    assert stored["count"].dtype is torch.int64
    archived = inshrink_core.open(trainer_archive)[20]
    floats = [key for key in stored if key != "count"]
    assert all(torch.equal(stored[key], archived[key].to(dtype)) for key in floats)
    error = sum(float((stored[key].double() - archived[key].double()).square().sum()) for key in floats)
    norm = sum(float(archived[key].double().square().sum()) for key in floats)
    assert report.relative_error == pytest.approx((error / norm) ** 0.5)
    assert not report.exact


def test_a_value_that_half_precision_cannot_hold_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.tensor([1e6, 1.0])}, tmp_path / "run" / "step_1.pt")
    inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink", codec="lossless")
    exported = {"weights_only": True, "layout": "safetensors", "exact": True}
    with pytest.raises(InputError, match="too large for float16"):
        inshrink_core.verbs.export(tmp_path / "a.inshrink", tmp_path / "m", dtype="fp16", **exported)
    assert not (tmp_path / "m").exists()
    inshrink_core.verbs.export(tmp_path / "a.inshrink", tmp_path / "m", dtype="bf16", **exported)


def test_cancelled_export_leaves_nothing_behind(archive_path, tmp_path):

    with pytest.raises(KeyboardInterrupt):
        inshrink_core.verbs.export(archive_path, tmp_path / "m", progress=Mock(side_effect=KeyboardInterrupt))
    assert list(tmp_path.iterdir()) == []
