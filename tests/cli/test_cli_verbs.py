"""The verbs end to end, on the first steps of the sample run."""

import shutil
import sys

import pytest
import torch

from inshrink_core.codecs.lattice.codec import LatticeCodec
from tests.processes import ran

STEPS = [10, 25, 50]


def test_inspect_reads_less_of_a_run_than_its_tensors(cli, small_run):
    document = cli("inspect", small_run, "--json").document
    assert document["bytes_read"] < document["raw_bytes"] / 2


def test_a_step_pattern_may_end_the_path_of_any_run(cli, small_run):
    assert cli("inspect", f"{small_run}/step_00001{{step}}.pt", "--json").document["steps"] == [0]
    assert cli("inspect", small_run, "--step-pattern", "step_{step}.pt", "--json").document["steps"] == STEPS
    outcome = cli("inspect", f"{small_run}/x{{step}}.pt", "--json")
    assert outcome.code == 2
    assert "does not match the step pattern" in outcome.err


def test_inspect_imports_neither_torch_nor_numba_nor_fsspec(cli, small_run, made_archive, tmp_path):
    assert cli("export", made_archive, "--pack", tmp_path / "p", "--quiet").code == 0
    places = [str(small_run), str(made_archive), str(tmp_path / "p"), f"file://{made_archive}"]
    program = (
        f"import sys; from inshrink_core.cli import main; codes = [main(['inspect', p]) for p in {places}]; "
        "loaded = {'torch', 'numba', 'fsspec', 'streamlit', 'pandas'} & set(sys.modules); "
        "assert (codes, loaded) == ([0] * 4, set()), (codes, loaded)"
    )
    done = ran(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


def test_several_archives_are_compared_in_one_document(cli, archive, small_run):
    words = ("--against", small_run, "--trust-run", "--steps", "10")
    cli("compare", archive, *words)  # From here on the answer is known, with the time it was found at.
    alone = cli("compare", archive, *words, "--json").document
    both = cli("compare", archive, archive, *words, "--json").document
    assert both == {"archives": [{"archive": str(archive), **alone}] * 2}
    outcome = cli("compare", archive, archive, *words, "--max-divergence", 0)
    assert outcome.code == 1
    assert outcome.out.count(str(archive)) == 2


@pytest.mark.parametrize("words", [("--json",), ("--quiet",), ("--progress", "jsonl"), ("--port", "0")])
def test_ui_refuses_what_it_cannot_do(cli, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "inshrink_app.launch", None)
    outcome = cli("ui", *words)
    assert outcome.code == 2
    assert words[0] in outcome.err


@pytest.mark.parametrize(
    "words",
    [
        ("restore", "-o", "{out}"),
        ("verify", "--deep"),
        ("compare", "--against", "{run}", "--trust-run", "--steps", "25", "--again"),
        ("export", "-o", "{out}"),
        ("prune", "--keep-last", "1", "--apply"),
        ("sensitivity", "--metric", "update"),
    ],
    ids=lambda words: words[0],
)
def test_verbs_decode_on_the_device_they_name(cli, archive, small_run, tmp_path, monkeypatch, words):
    decode, used = LatticeCodec.decode, set()

    def decoding(self, spec, block, reference, device="cpu"):
        used.add(device)
        return decode(self, spec, block, reference, device)

    monkeypatch.setattr(LatticeCodec, "decode", decoding)
    verb, *rest = (word.format(run=small_run, out=tmp_path / "out") for word in words)
    outcome = cli(verb, archive, *rest, "--device", "cpu:0", "--json")
    assert outcome.code == 0
    assert outcome.document["device"] == "cpu:0"
    assert used == {"cpu:0"}


def test_compress_and_restore_leave_the_processors_to_their_own_workers(cli, small_run, archive, tmp_path):
    for words in (
        ("compress", small_run, "-o", tmp_path / "a.inshrink"),
        ("restore", archive, "-o", tmp_path),
    ):
        torch.set_num_threads(2)
        assert cli(*words).code == 0
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "{archive}", "--against", "{run}"),
        ("search", "{run}", "--max-drop", "0.01"),
        ("bench", "{run}"),
    ],
)
def test_the_evaluator_of_a_run_is_not_executed_without_consent(cli, archive, small_run, tmp_path, words):
    run, witness = shutil.copytree(small_run, tmp_path / "copy"), tmp_path / "executed"
    code = f"open({str(witness)!r}, 'w')\ndef evaluate(s): return {{'accuracy': 1.0}}\n"
    (run / "evaluator.py").write_text(code)
    outcome = cli(*(word.format(archive=archive, run=run) for word in words), "--json")
    assert outcome.code == 2
    assert outcome.document["error"]["type"] == "UntrustedCodeError"
    assert "--trust-run" in outcome.document["error"]["remedy"]
    assert not witness.exists()


@pytest.fixture
def based(cli, small_run, tmp_path):
    """An archive upon a base model that its hint does not lead to, and the base."""
    made = tmp_path / "made.inshrink"
    outcome = cli("compress", small_run, "-o", made, "--steps", "50", "--base", f"{small_run}@25")
    assert outcome.code == 0
    assert "base model" in outcome.out
    moved = tmp_path / "a" / "b" / "moved.inshrink"
    shutil.copytree(made, moved)
    return moved, f"{small_run}@25"


def test_every_verb_that_decodes_asks_for_the_base_and_takes_it(cli, small_run, tmp_path, based):
    archive, base = based
    verbs = (
        ("restore", archive, "-o", tmp_path / "out"),
        ("verify", archive, "--deep"),
        ("export", archive, "-o", tmp_path / "one.inshrink"),
        ("compare", archive, "--against", small_run, "--trust-run"),
        ("prune", archive, "--stand-alone", "--apply"),
    )
    for words in verbs:
        refused = cli(*words)
        assert refused.code in (1, 2)
        assert "base model" in refused.out + refused.err
        given = cli(*words, "--base", base)
        assert given.code == 0, given.err
    assert cli("verify", archive, "--deep").code == 0
    assert "base" not in cli("inspect", archive, "--json").document


def test_watch_begins_upon_a_base(cli, small_run, tmp_path):
    words = ("compress", small_run, "-o", tmp_path / "w.inshrink", "--watch", "--until", 25, "--poll", 0.1)
    outcome = cli(*words, "--base", f"{small_run}@10", "--json")
    assert outcome.code == 0
    assert outcome.document["base"]["name"] == f"{small_run.name}@10"
