"""The first frame of a fine-tuning against its base model: smaller, the same bits, never a guess."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainWriter, open_base
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.errors import BaseModelError, ConfigError, DamagedError, InputError
from inshrink_core.frame import FrameKind
from tests.builders import flip
from tests.runs import load, model, train, write_run

pytestmark = pytest.mark.usefixtures("evaluators_here")

CODECS = ("lattice", "lossless")


class Tuned(NamedTuple):
    """A pre-trained model, and a fine-tuning of it; `moved` is a folder from which hints lead nowhere."""

    base: Path
    run: Path
    folder: Path

    @property
    def state(self):
        return torch.load(self.base, weights_only=True)["model"]

    def compressed(self, name="a", **options):
        target = self.folder / f"{name}.inshrink"
        inshrink_core.compress(self.run, target, **{"base": self.base, "optimizer": "drop", **options})
        return target

    def moved(self, archive):
        target = self.folder / "else" / "where" / archive.name
        shutil.copytree(archive, target)
        return target


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    base = write_run(folder / "pretrained", n_steps=1, every=20) / "step_20.pt"
    network, _ = load(base)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    (folder / "run").mkdir()
    for step in (1, 2, 3, 4):
        train(network, optimizer, range(20 + 3 * step, 23 + 3 * step))
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "run" / f"step_{step}.pt")
    return folder


@pytest.fixture
def tuned(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Tuned(tmp_path / "pretrained" / "step_20.pt", tmp_path / "run", tmp_path)


def states(archive):
    return {step: archive[step].state_dict() for step in archive.steps}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for step, state in one.items():
        assert all(torch.equal(value, other[step][name]) for name, value in state.items())


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_first_frame_is_smaller_and_every_step_decodes_to_the_same_bits(codec, look_ahead, tuned):
    plain = Archive.open(tuned.compressed("plain", codec=codec, base=None, look_ahead=look_ahead))
    based = Archive.open(tuned.compressed("based", codec=codec, look_ahead=look_ahead))
    assert_equal(states(based), states(plain))
    payload = [
        sum(entry.nbytes for entry in one.frame(one.frames[0]).entries if not entry.attachment)
        for one in (based, plain)
    ]
    assert payload[0] < 0.7 * payload[1]
    record = based.base_of(based.frames[0])
    assert record is not None
    assert (record.name, record.n_without) == ("step_20.pt", 0)
    assert [based.base_of(info) for info in based.frames[1:]] == [None, None, None]


@pytest.mark.parametrize("codec", CODECS)
def test_base_serves_from_whatever_file_holds_the_same_tensors(codec, tuned):
    archive = tuned.moved(tuned.compressed(codec=codec))
    save_file(tuned.state, tuned.folder / "base.safetensors")
    inshrink_core.compress(tuned.base.parent, tuned.folder / "pre.inshrink", codec="lossless")
    expected = states(Archive.open(tuned.folder / "a.inshrink"))
    for base in (
        tuned.folder / "base.safetensors",
        f"{tuned.folder / 'pre.inshrink'}@20",
        tuned.folder / "pre.inshrink",
        tuned.base.parent,
        tuned.state,
        inshrink_core.open(tuned.base.parent)[20],
    ):
        assert_equal(states(Archive.open(archive, base=base)), expected)


def test_missing_base_is_an_error_that_names_it_and_harms_no_later_keyframe(tuned):
    archive = tuned.moved(tuned.compressed(keyframe_every=2))
    opened = Archive.open(archive)
    digest = opened.base_of(opened.frames[0]).digest.hex()  # type: ignore[union-attr]
    for step in (1, 2):
        with pytest.raises(
            BaseModelError, match=f"expected SHA-256 {digest}, found nothing at .*--base FILE"
        ):
            opened[step].state_dict()
    complete = Archive.open(tuned.folder / "a.inshrink")
    for step in (3, 4):
        expected = complete[step].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in opened[step].state_dict().items())
    found = inshrink_core.verify(archive, deep=True)
    assert not found.ok
    assert all("step 1" in problem.where or "step 2" in problem.where for problem in found.problems)
    assert inshrink_core.verify(archive, deep=True, base=tuned.base, against=inshrink_core.open(tuned.run)).ok


def test_base_that_changed_is_refused_whether_given_or_found(tuned):
    archive = tuned.compressed()
    content = torch.load(tuned.base, weights_only=True)
    content["model"]["4.weight"][0, 0] += 1e-3
    torch.save(content, tuned.base)
    for opened in (Archive.open(archive), Archive.open(archive, base=tuned.base)):
        assert opened[1]["0.weight"].shape == (8, 1, 3, 3)
        with pytest.raises(BaseModelError, match=r"found [0-9a-f]{64} in step_20\.pt"):
            _ = opened[1]["4.weight"]
    with pytest.raises(BaseModelError, match=r"no tensor '4\.weight' of float32 \(10, 288\)"):
        _ = Archive.open(archive, base={"4.weight": torch.zeros(3)})[1]["4.weight"]


def test_damaged_base_is_an_error_of_the_base(tuned):
    archive = tuned.compressed()
    flip(tuned.base, tuned.base.read_bytes().index(tuned.state["4.weight"].numpy().tobytes()) + 40)
    with pytest.raises(BaseModelError, match="does not match its CRC-32"):
        _ = Archive.open(archive)[1]["4.weight"]


def test_archive_made_to_stand_alone_keeps_every_bit(tuned):
    archive = tuned.compressed()
    expected = states(Archive.open(archive))
    planned = inshrink_core.verbs.prune(archive, stand_alone=True)
    assert [frame.step for frame in planned.plan.rekeyed] == [1]
    assert planned.plan.removed == ()
    inshrink_core.verbs.prune(archive, stand_alone=True, apply=True)
    moved = tuned.moved(archive)
    assert_equal(states(Archive.open(moved)), expected)
    assert inshrink_core.verify(moved, deep=True).ok
    # And it goes on as before, without the base.
    with pytest.raises(InputError, match="without a base model, or no longer needs one"):
        inshrink_core.compress(tuned.run, moved, base=tuned.base)
    assert inshrink_core.compress(tuned.run, moved).appended == ()


def test_pruning_the_first_step_needs_the_base_and_leaves_none(tuned):
    archive = tuned.moved(tuned.compressed())
    before = [path.read_bytes() for path in sorted(archive.rglob("*.frame"))]
    with pytest.raises(BaseModelError):
        inshrink_core.verbs.prune(archive, keep_last=2, apply=True)
    assert [path.read_bytes() for path in sorted(archive.rglob("*.frame"))] == before
    inshrink_core.verbs.prune(archive, keep_last=2, apply=True, base=tuned.base)
    opened, complete = Archive.open(archive), Archive.open(tuned.folder / "a.inshrink")
    assert opened.steps == (3, 4)
    assert_equal(states(opened), {step: complete[step].state_dict() for step in (3, 4)})


def test_pruning_in_between_keeps_the_first_step_upon_its_base(tuned):
    archive = tuned.compressed()
    expected = Archive.open(archive)[1].state_dict()
    inshrink_core.verbs.prune(archive, keep=[1], apply=True)
    opened = Archive.open(archive)
    assert opened.steps == (1, 4)
    assert opened.base_of(opened.frames[0]) is not None
    assert all(torch.equal(value, expected[name]) for name, value in opened[1].state_dict().items())


def test_exported_step_stands_alone(tuned):
    archive = tuned.compressed()
    for step in (1, 2):
        target = tuned.folder / "else" / "where" / f"{step}.inshrink"
        inshrink_core.verbs.export(archive, target, step=step)
        expected, found = Archive.open(archive)[step].state_dict(), Archive.open(target)[step].state_dict()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_packed_archive_finds_its_base(tuned):
    archive = tuned.compressed()
    inshrink_core.verbs.export(archive, pack=tuned.folder / "packed.inshrink")
    assert_equal(states(Archive.open(tuned.folder / "packed.inshrink")), states(Archive.open(archive)))


def test_appending_goes_on_from_a_frame_upon_a_base(tuned):
    complete = tuned.compressed("whole", look_ahead=False)
    parts = tuned.compressed("parts", steps=[1], look_ahead=False)
    inshrink_core.compress(tuned.run, parts, steps=[2])
    moved = tuned.moved(parts)
    with pytest.raises(BaseModelError):
        inshrink_core.compress(tuned.run, moved)
    assert inshrink_core.compress(tuned.run, moved, base=tuned.base).appended == (3, 4)
    assert_equal(states(Archive.open(moved, base=tuned.base)), states(Archive.open(complete)))


def test_another_base_is_refused_before_anything_is_written(tuned):
    archive = tuned.compressed(steps=[1])
    other = {name: value + 1 for name, value in tuned.state.items()}
    with pytest.raises(BaseModelError, match="in a state dict"):
        inshrink_core.compress(tuned.run, archive, base=other)
    plain = tuned.compressed("plain", base=None, steps=[1])
    with pytest.raises(InputError, match="started without a base model"):
        inshrink_core.compress(tuned.run, plain, base=tuned.base)
    for base, message in (
        ({"encoder.weight": torch.zeros(3, 3)}, "it is another one"),
        ({name: value.double() for name, value in tuned.state.items() if "weight" in name}, "dtype"),
    ):
        with pytest.raises(BaseModelError, match=message):
            tuned.compressed("never", base=base)
        assert not (tuned.folder / "never.inshrink").exists()


def test_tensors_the_base_lacks_are_stored_without_it_and_counted(tuned):
    state = tuned.state
    del state["4.bias"]
    state["4.weight"] = state["4.weight"].half()
    archive = tuned.compressed(base=state)
    report = inshrink_core.verbs.inspect(archive).facts["base"]
    assert (report["tensors"], report["tensors_without"]) == (len(tuned.state) - 2, 2)
    opened = Archive.open(archive)  # a state dict lay nowhere
    assert opened[1]["4.weight"].shape == (10, 288)
    with pytest.raises(BaseModelError, match="found none"):
        _ = opened[1]["0.weight"]


def test_adapters_are_refused_with_their_name_and_taken_where_the_base_holds_them(tuned):
    adapters = {"q.lora_A.weight": torch.randn(4, 64), "q.lora_B.weight": torch.randn(64, 4)}
    run = tuned.folder / "adapters"
    run.mkdir()
    for step in (1, 2):
        save_file(
            {name: value + step * 1e-4 for name, value in adapters.items()}, run / f"{step}.safetensors"
        )
    with pytest.raises(BaseModelError, match="adapters"):
        inshrink_core.compress(run, tuned.folder / "l.inshrink", base=tuned.base)
    report = inshrink_core.compress(run, tuned.folder / "l.inshrink", base=tuned.state | adapters)
    assert report.size.base is not None
    assert len(report.size.base.tensors) == 2
    assert Archive.open(tuned.folder / "l.inshrink", base=adapters)[2]["q.lora_A.weight"].shape == (4, 64)


def test_codec_without_a_rule_for_it_refuses_a_base(tuned):
    with pytest.raises(ConfigError, match="codec 'inshrinkerator' cannot encode against a base model"):
        tuned.compressed(codec="inshrinkerator")
    assert not (tuned.folder / "a.inshrink").exists()


def test_base_is_one_checkpoint_that_stands_alone(tuned):
    with pytest.raises(InputError, match="holds 4 checkpoints, and a base model is one"):
        open_base(tuned.run)
    assert open_base(f"{tuned.run}@3").name == "run@3"
    with pytest.raises(InputError, match="needs a base model itself"):
        open_base(tuned.compressed())
    with pytest.raises(InputError, match="this is a run"):
        open_base(inshrink_core.open(tuned.run))  # type: ignore[arg-type]


def test_record_that_does_not_fit_its_frame_is_damage(tuned):
    config = make_chain_config("x", "lossless", None, "drop", 32, "cpu", 1)
    archive = tuned.folder / "x.inshrink"
    with ArchiveWriter(archive, create=True) as writer:
        ChainWriter(writer, config).append(inshrink_core.open(tuned.run)[1])
        meta = {"digest": bytes(32), "tensors": bytes(8), "name": "x", "path": None, "step": None}
        for step, record in ((2, meta), (3, {**meta, "tensors": b"odd"}), (4, "x")):
            with writer.begin(step=step, kind=FrameKind.KEYFRAME, parent_id=None, external=True) as frame:
                frame.commit({"base": record})
    opened = Archive.open(archive)
    for info in opened.reader.frames[1:]:
        with pytest.raises(DamagedError, match="meta 'base'"):
            opened.frame(info)


def test_record_without_hints_is_read(tmp_path):
    with (
        ArchiveWriter(tmp_path / "x", create=True) as writer,
        writer.begin(step=1, kind=FrameKind.KEYFRAME, parent_id=None, external=True) as frame,
    ):
        info = frame.commit({"base": {"digest": bytes(32), "tensors": b"", "name": "x"}})
    record = Archive.open(tmp_path / "x").base_of(info)
    assert record is not None
    assert (record.path, record.step) == (None, None)


def test_hostile_hint_is_read_as_a_checkpoint_at_most(tuned):
    archive = tuned.moved(tuned.compressed())
    hint = (archive.parent / "../../run/../pretrained/step_20.pt").resolve()
    hint.unlink()
    hint.mkdir()
    (hint / "evil.pt").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(BaseModelError, match=r"cannot be opened|nothing at"):
        Archive.open(tuned.folder / "a.inshrink")[1].state_dict()


def test_base_is_looked_for_only_where_the_caller_allows_it(tuned):
    opened = Archive.open(tuned.compressed())
    asked: list[Path] = []
    opened.bases.allows = lambda real: bool(asked.append(real))
    with pytest.raises(BaseModelError, match="outside of the directories that may be opened"):
        opened[1].state_dict()
    assert asked == [tuned.base.resolve()]


def test_bounded_compression_begins_upon_the_base(tuned):
    judge = tuned.folder / "judge.py"
    judge.write_text(
        "import torch\n"
        "def evaluate(state):\n"
        "    x = torch.linspace(-1, 1, 288 * 64).view(64, 288)\n"
        "    logits = x @ state['4.weight'].float().T + state['4.bias'].float()\n"
        "    return {'loss': float(logits.square().mean()), 'log_probs': logits.log_softmax(1)}\n"
    )
    report = inshrink_core.compress(
        tuned.run,
        tuned.folder / "b.inshrink",
        steps=[1, 2],
        base=tuned.base,
        optimizer="drop",
        max_divergence=0.01,
        evaluator=f"{judge}:evaluate",
    )
    assert report.failure is None
    assert report.to_json()["base"]["name"] == "step_20.pt"


@pytest.mark.parametrize("given", ["path", "state"])
def test_saver_begins_upon_the_base_and_restores_with_it(given, tuned):
    network, _ = load(tuned.base)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    base = tuned.base if given == "path" else network.state_dict()
    with inshrink_core.Saver(tuned.folder / "s.inshrink", network, optimizer, base=base) as saver:
        for step in (1, 2):
            train(network, optimizer, range(30 * step, 30 * step + 3))
            saver.save(step)
        saver.flush()
    assert Archive.open(tuned.folder / "s.inshrink").base_of(saver._archiver.reader.frames[0]) is not None
    moved = tuned.moved(tuned.folder / "s.inshrink")
    with inshrink_core.Saver(moved, model()) as saver, pytest.raises(BaseModelError):
        saver.restore(1)
    again, optimizer = load(tuned.base)
    with inshrink_core.Saver(moved, again, optimizer, base=tuned.base) as saver:
        assert saver.restore(1) == 1
        train(again, optimizer, range(90, 93))
        saver.save(5)
