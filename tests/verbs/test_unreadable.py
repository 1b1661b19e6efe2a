"""What looks like a checkpoint and is not archived is named, the rest is archived, the verb ends with 1."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.errors import InputError, UnreadableStepError
from inshrink_core.formats import open_run
from inshrink_core.training import Saver
from tests.builders import flip
from tests.formats.run_builders import save_huggingface
from tests.formats.shards import save_shards

STEPS = (100, 200, 300)
LOST = 200
EXACT = {"codec": "lossless", "optimizer": "exact", "threads": 1}


def weights(step):
    generator = torch.Generator().manual_seed(step)
    return {"fc.weight": torch.randn(40, 30, generator=generator), "fc.bias": torch.ones(40) * step}


def torch_files(root):
    root.mkdir(exist_ok=True)
    for step in STEPS:
        torch.save({"model": weights(step), "step": step}, root / f"step_{step}.pt")
    return root / f"step_{LOST}.pt"


def safetensors_files(root):
    for step in STEPS:
        save_file(weights(step), root / f"model_{step}.safetensors", metadata={"step": str(step)})
    return root / f"model_{LOST}.safetensors"


def suffixless_files(root):
    for step in STEPS:
        torch.save({"model": weights(step)}, root / f"ckpt_{step}")
    return root / f"ckpt_{LOST}"


def huggingface(root, name="model.safetensors"):
    save_huggingface(root, STEPS)
    return root / f"checkpoint-{LOST}" / name


def shards_of_huggingface(root):
    save_huggingface(root, STEPS, sharded=True)
    return root / f"checkpoint-{LOST}" / "model-00002-of-00002.safetensors"


def optimizer_of_huggingface(root):
    return huggingface(root, "optimizer.pt")


def distributed(root, name="__1_0.distcp"):
    for step in STEPS:
        parts = weights(step)["fc.weight"].chunk(2)
        rows = [(rank, (rank * 20, 0), part) for rank, part in enumerate(parts)]
        folder = save_shards(root / f"step-{step}", {"model.fc.weight": ((40, 30), rows)})
        (folder / "meta.json").write_text("{}")
    return root / f"step-{LOST}" / name


def metadata_of_distributed(root):
    return distributed(root, ".metadata")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


def deleted(path):
    path.unlink()


def dangling(path):
    path.unlink()
    path.symlink_to(path.parent / "gone")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


ANY = (cut, empty, zeroed, dangling, a_pipe)
CASES = [
    *((torch_files, damage) for damage in ANY),
    *((huggingface, damage) for damage in (*ANY, deleted)),
    *((safetensors_files, cut), (suffixless_files, empty), (optimizer_of_huggingface, zeroed)),
    *((make, damage) for make in (shards_of_huggingface, distributed) for damage in (cut, deleted)),
    *((metadata_of_distributed, damage) for damage in (dangling, deleted)),
]
"""Every damage to a file and to a folder; of the other layouts, one that its reader has to notice itself."""


def damaged_run(root, make, damage):
    """Make a run and damage a file of it; return the file or folder of the step that is lost."""
    root.mkdir()
    path = make(root)
    damage(path)
    return path if path.parent == root else path.parent


def named(make):
    return getattr(make, "__name__", "")


@pytest.mark.parametrize(("make", "damage"), CASES, ids=named)
def test_what_cannot_be_read_is_named_and_the_rest_is_archived(make, damage, tmp_path, capsys):
    lost = damaged_run(tmp_path / "run", make, damage)
    target = tmp_path / "a.inshrink"
    assert main(["compress", str(tmp_path / "run"), "-o", str(target), "--codec", "lossless", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (row,) = document["unreadable"]
    assert (row["path"], row["step"]) == (str(lost), LOST)
    assert row["reason"]
    assert document["appended"] == [100, 300]
    assert document["error"]["exit_code"] == 1
    assert main(["verify", str(target), "--deep", "--against", str(tmp_path / "run"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in document["unreadable"]] == [str(lost)]
    assert not document["ok"]
    words = ["compress", str(tmp_path / "run"), "-o", str(target), "--skip-damaged", "--json"]
    assert main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["unreadable"]) == 1
    assert main(["verify", str(target), "--against", str(tmp_path / "run"), "--skip-damaged", "-q"]) == 0


def test_a_step_that_was_asked_for_ends_with_2(tmp_path, capsys):
    damaged_run(tmp_path / "run", torch_files, cut)
    run, target = str(tmp_path / "run"), tmp_path / "a.inshrink"
    assert main(["compress", run, "-o", str(target), "--steps", "100:200", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["appended"] == [100]
    assert "step_200.pt" in document["error"]["message"]
    assert main(["compress", run, "-o", str(target), "--steps", "300", "-q"]) == 0
    with pytest.raises(UnreadableStepError, match=r"step_200\.pt"):
        inshrink_core.compress(run, tmp_path / "b.inshrink", steps=[LOST])
    assert not (tmp_path / "b.inshrink").exists()


@pytest.mark.parametrize("bounded", [False, True])
def test_a_step_that_fails_halfway_leaves_no_partial_frame(bounded, tmp_path, capsys):
    root = tmp_path / "run"
    path = torch_files(root)
    flip(path)
    (tmp_path / "judge.py").write_text(
        "def evaluate(state):\n    return {'loss': float(state['fc.weight'].square().mean())}\n"
    )
    judged = ["--evaluator", f"{tmp_path / 'judge.py'}:evaluate", "--max-drop", "0.01"]
    target = tmp_path / "a.inshrink"
    words = ["compress", str(root), "-o", str(target), "--json", *(judged if bounded else [])]
    assert main(words) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["appended"] == [100, 300]
    assert [row["step"] for row in document["unreadable"]] == [LOST]
    archive = inshrink_core.Archive.open(target)
    assert archive.steps == (100, 300)
    assert inshrink_core.verify(target, deep=True).ok
    assert not [path for path in (target / "frames").rglob("*") if path.name.startswith(".")]
    verify = ["verify", str(target), "--against", str(root), "--json"]
    assert main(verify) == 1
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["unreadable"]] == [LOST]
    assert main([*verify, "--skip-damaged"]) == 0
    assert main(["compress", str(root), "-o", str(target), "--allow-damaged", "-q"]) == 0
    assert inshrink_core.Archive.open(target).steps == STEPS
    capsys.readouterr()
    compare = ["compare", str(target), "--against", str(root), "--json", *judged[:2]]
    assert main(compare) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in document["steps"]] == [100, 300]
    assert [row["step"] for row in document["unreadable"]] == [LOST]
    assert main([*compare, "--skip-damaged"]) == 0
    assert main([*compare, "--steps", "200"]) == 2


def test_sound_means_that_all_of_the_run_can_be_restored(tmp_path, capsys):
    root, target = tmp_path / "run", tmp_path / "a.inshrink"
    torch_files(root)
    inshrink_core.compress(root, target, steps=[100], **EXACT)
    assert main(["verify", str(target), "--against", str(root)]) == 1
    assert "200, 300" in capsys.readouterr().out
    assert main(["verify", str(target), "--against", str(root / "step_1*.pt"), "-q"]) == 0
    inshrink_core.compress(root, target, **EXACT)
    assert main(["verify", str(target), "--against", str(root), "-q"]) == 0
    inshrink_core.verbs.prune(target, keep=[100, 300], apply=True)
    assert main(["verify", str(target), "--against", str(root), "-q"]) == 0


def test_what_is_no_checkpoint_is_not_called_unreadable(tmp_path):
    root = tmp_path / "run"
    torch_files(root)
    (root / "training_args.bin").write_bytes(b"\x80\x04N.")
    (root / "tokens.bin").write_bytes(b"\x17\x00\x18\x00" * 99)
    (root / "vocab_32000.bin").write_bytes(b"\x17\x00\x18\x00" * 99)
    (root / "vocab.pt").write_bytes(b"\x80\x04N.")
    (root / "corpus.pt").write_text("uma frase\n" * 9)
    (root / "log_100.txt").write_text("")
    (root / "metrics_200.csv").write_text("")
    (root / "tokenizer.model").write_bytes(b"")
    (root / "events.out.tfevents.123").write_bytes(b"")
    torch.save({"names": ["a"]}, root / "labels.pt")
    shutil.copy(root / "step_300.pt", root / "step_300-v1.pt")
    (root / "last.pt").symlink_to("step_300.pt")
    torch.save({"model": weights(1)}, root / "best.pt")
    (root / "logs").mkdir()
    (root / "data").mkdir()
    (root / "data" / "train.bin").write_bytes(b"\x17\x00" * 99)
    (root / "step_400.pt.tmp").write_bytes(b"")
    report = inshrink_core.compress(root, tmp_path / "a.inshrink", **EXACT)
    assert report.unreadable == ()
    assert report.appended == STEPS
    left_out = {Path(row.path).name for row in report.left_out}
    assert {"last.pt", "vocab_32000.bin", "labels.pt", "step_400.pt.tmp", "vocab.pt", "corpus.pt"} <= left_out
    assert report.branches == ("best",)
    assert report.fates["duplicate"] == 2


def test_a_watch_waits_for_what_is_unfinished_and_names_what_stays_so(tmp_path):
    root = tmp_path / "run"
    torch_files(root)
    finished = (root / "step_200.pt").read_bytes()
    cut(root / "step_200.pt")
    empty(root / "step_100.pt")

    def finish():
        time.sleep(0.4)
        (root / "step_200.pt").write_bytes(finished)

    thread = threading.Thread(target=finish)
    thread.start()
    events = []
    report = inshrink_core.compress(
        root, tmp_path / "a.inshrink", interval=0.1, idle=2.5, progress=events.append, **EXACT, watch=True
    )
    thread.join()
    assert inshrink_core.Archive.open(tmp_path / "a.inshrink").steps == (200, 300)
    assert [(row.step, row.reason) for row in report.unreadable] == [(100, "the file is empty")]
    assert [event.step for event in events if event.detail.startswith("unreadable")] == [100]
    assert report.failure.exit_code == 1
    assert report.to_json()["unreadable"][0]["path"] == str(root / "step_100.pt")
    assert main(["verify", str(tmp_path / "a.inshrink"), "--against", str(root), "-q"]) == 1


def test_steps_whose_files_are_called_alike_are_restored_apart(tmp_path):
    for folder, step in (("a", 100), ("b", 200)):
        (tmp_path / folder).mkdir()
        torch.save({"model": weights(step), "step": step}, tmp_path / folder / "model.pt")
    inshrink_core.compress(str(tmp_path / "*" / "model.pt"), tmp_path / "a.inshrink", **EXACT)
    restored = inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out", steps=[100, 200]).paths
    assert [path.read_bytes() for path in restored] == [
        (tmp_path / folder / "model.pt").read_bytes() for folder in ("a", "b")
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.text(alphabet="aAbé:\\\n. \x7f\udcff", min_size=1, max_size=6),
            st.text(alphabet="aAß", min_size=60, max_size=200),
        ),
        max_size=6,
    )
)
def test_whatever_compress_accepts_restore_writes(tmp_path_factory, names):
    tmp_path = tmp_path_factory.mktemp("names")
    folder = tmp_path / "run" / "checkpoint-1"
    folder.mkdir(parents=True)
    torch.save(weights(1), folder / "pytorch_model.bin")
    for name in names:
        try:
            (folder / name).write_bytes(b"{}")
        except (OSError, UnicodeError):
            continue
    there = {os.fspath(path.relative_to(folder)) for path in folder.iterdir() if path.is_file()}
    report = inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink", **EXACT)
    paths = inshrink_core.restore(tmp_path / "a.inshrink", tmp_path / "out").paths
    left_out = {os.path.basename(row.path) for row in report.left_out}  # noqa: PTH119 - a name as it is
    written = {path.name for path in paths}
    assert written | left_out == there
    assert not written & left_out
    shutil.rmtree(tmp_path)


def test_an_original_that_rots_later_is_named_by_compare_and_verify(tmp_path):
    root, target = tmp_path / "run", tmp_path / "a.inshrink"
    path = torch_files(root)
    inshrink_core.compress(root, target, **EXACT)
    cut(path)
    found = inshrink_core.verify(target, against=open_run(root))
    assert not found.ok
    assert [row.step for row in found.unreadable] == [LOST]
    assert main(["compress", str(root), "-o", str(target), "-q"]) == 1


def test_a_folder_saver_names_what_it_could_not_archive(tmp_path, caplog):
    save_huggingface(tmp_path / "run", STEPS)
    cut(tmp_path / "run" / "checkpoint-200" / "optimizer.pt")
    empty(tmp_path / "run" / "checkpoint-300" / "model.safetensors")
    (tmp_path / "run" / "checkpoint-100" / "c:x.json").write_text("{}")
    saver = Saver(tmp_path / "a.inshrink")
    for step in STEPS:
        saver.save_folder(tmp_path / "run" / f"checkpoint-{step}", step)
    with pytest.raises(InputError, match="2 saves could not be archived"):
        saver.close()
    assert sorted(saver.failures) == [200, 300]
    assert inshrink_core.Archive.open(tmp_path / "a.inshrink").steps == (100,)
    assert "c:x.json" in caplog.text
