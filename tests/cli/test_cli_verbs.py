"""The verbs end to end, on the first steps of the sample run."""

import subprocess
import sys

import pytest
import torch

from inshrink_core.codecs.lattice.codec import LatticeCodec

STEPS = [10, 25, 50]


def test_inspect_lists_steps_tensors_and_roles_of_a_run(cli, small_run):
    outcome = cli("inspect", small_run, "--json")
    document = outcome.document
    assert outcome.code == 0
    assert (document["kind"], document["format"], document["steps"]) == ("run", "torch", STEPS)
    assert {"weight", "exp_avg", "exp_avg_sq"} <= set(document["roles"])
    keys = {row["key"]: row for row in document["tensors"]}
    assert keys["conv1.weight"]["shape"] == [16, 1, 3, 3]
    assert keys["conv1.weight"]["raw_bytes"] == 16 * 9 * 4 * 3
    assert document["n_parameters"] == sum(
        row["raw_bytes"] // 12 for row in document["tensors"] if row["role"] == "weight"
    )
    assert sum(row["raw_bytes"] for row in document["roles"].values()) == document["raw_bytes"]
    assert document["bytes_read"] > 0


def test_inspect_reads_less_of_a_run_than_its_tensors(cli, small_run):
    document = cli("inspect", small_run, "--json").document
    assert document["bytes_read"] < document["raw_bytes"] / 2


def test_a_step_pattern_may_end_the_path_of_any_run(cli, small_run):
    assert cli("inspect", f"{small_run}/step_00001{{step}}.pt", "--json").document["steps"] == [0]
    assert cli("inspect", small_run, "--step-pattern", "step_{step}.pt", "--json").document["steps"] == STEPS
    outcome = cli("inspect", f"{small_run}/x{{step}}.pt", "--json")
    assert outcome.code == 2
    assert "does not match the step pattern" in outcome.err


def test_inspect_shows_a_run_as_text_that_fits_100_columns(cli, small_run):
    outcome = cli("inspect", small_run, "--tensors")
    assert outcome.code == 0
    assert "10, 25, 50" in outcome.out
    assert "conv1.weight" in outcome.out
    assert "conv1.weight@exp_avg" in outcome.out
    assert "\x1b" not in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) <= 100


def test_inspect_shows_frames_and_ratios_of_an_archive(cli, made_archive):
    outcome = cli("inspect", made_archive, "--json")
    document = outcome.document
    assert document["kind"] == "archive"
    assert [frame["step"] for frame in document["frames"]] == STEPS
    assert document["frames"][0]["kind"] == "keyframe"
    assert document["ratio_weights"] > 1
    assert document["ratio_total"] > 1
    assert document["codec"] == "lattice"
    assert {row["key"]: row for row in document["tensors"]}["conv1.weight"]["ratio"] > 1
    text = cli("inspect", made_archive, "--tensors").out
    assert "keyframe" in text
    assert "×" in text


def test_inspect_and_help_never_import_torch(small_run, made_archive):
    program = (
        "import sys; from inshrink_core.cli import main; codes = [main(words) for words in (['--help'], "
        f"['inspect', {str(small_run)!r}], ['inspect', {str(made_archive)!r}])]; "
        "assert codes == [0, 0, 0], codes; "
        "loaded = {'torch', 'numba', 'streamlit', 'pandas'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compress_reports_what_scripts_rely_on(cli, small_run, tmp_path):
    outcome = cli(
        "compress",
        small_run,
        "-o",
        tmp_path / "a.inshrink",
        "--json",
        "--codec",
        "inshrinkerator",
        "--set",
        "bins=8",
    )
    document = outcome.document
    assert outcome.code == 0
    assert outcome.err == ""
    assert document["appended"] == STEPS
    assert document["config"]["bins"] == 8
    assert document["ratio_weights"] > 1
    assert document["raw_bytes"] > document["archive_bytes"] > 0
    assert [frame["step"] for frame in document["frames"]] == STEPS
    assert set(document["frames"][0]) == {"step", "kind", "bytes", "ratio_total", "ratio_weights"}
    assert 0 < document["relative_error"] < 1


def test_verify_finds_a_sound_archive_sound(cli, archive, small_run):
    outcome = cli("verify", archive, "--deep", "--against", small_run, "--json")
    assert (outcome.code, outcome.document["ok"], outcome.document["problems"]) == (0, True, [])
    assert {row["step"] for row in outcome.document["errors"]} == set(STEPS)
    text = cli("verify", archive, "--against", small_run).out
    assert "worst tensors" in text
    assert "sound: 3 frames" in text


def test_verify_ends_with_1_where_nothing_of_the_archive_can_be_opened(cli, archive):
    for path in archive.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:20])
    outcome = cli("verify", archive, "--json")
    assert outcome.code == 1
    assert outcome.document["problems"]


def test_compare_shows_the_stale_copy_beside_every_step(cli, archive, small_run):
    outcome = cli("compare", archive, "--against", small_run, "--trust-run", "--json")
    document = outcome.document
    assert outcome.code == 0, outcome.err
    assert (document["metric"], document["direction"]) == ("accuracy", "higher")
    assert [row["step"] for row in document["steps"]] == STEPS
    assert document["steps"][0]["stale_drop"] is None
    assert document["steps"][2]["stale_divergence"] > document["steps"][2]["divergence"]


def test_several_archives_are_compared_in_one_document(cli, archive, small_run):
    words = ("--against", small_run, "--trust-run", "--steps", "10")
    cli("compare", archive, *words)  # From here on the answer is known, with the time it was found at.
    alone = cli("compare", archive, *words, "--json").document
    both = cli("compare", archive, archive, *words, "--json").document
    assert both == {"archives": [{"archive": str(archive), **alone}] * 2}
    outcome = cli("compare", archive, archive, *words, "--max-divergence", 0)
    assert outcome.code == 1
    assert outcome.out.count(str(archive)) == 2


def test_compare_ends_with_1_where_a_bound_is_exceeded(cli, archive, small_run):
    words = ("compare", archive, "--against", small_run, "--trust-run", "--steps", "10")
    assert cli(*words, "--max-drop", 0.9, "--max-divergence", 5).code == 0
    outcome = cli(*words, "--max-divergence", 0)
    assert outcome.code == 1
    assert "--max-divergence" in outcome.err
    assert "previous div." in outcome.out
    assert "≈" not in outcome.out


def test_compare_does_not_execute_the_code_of_a_run_without_consent(cli, archive, small_run, tmp_path):
    import shutil

    run = shutil.copytree(small_run, tmp_path / "copy")
    witness = tmp_path / "executed"
    (run / "evaluator.py").write_text(
        f"open({str(witness)!r}, 'w')\ndef evaluate(s): return {{'accuracy': 1.0}}\n"
    )
    outcome = cli("compare", archive, "--against", run, "--json")
    assert outcome.code == 2
    assert outcome.document["error"]["type"] == "UntrustedCodeError"
    assert not witness.exists()


@pytest.mark.parametrize("by", ["tensor", "block", "layer_type"])
def test_sensitivity_has_a_value_per_row_and_step(cli, small_run, by):
    outcome = cli("sensitivity", small_run, "--metric", "fisher", "--by", by, "--json")
    document = outcome.document
    assert outcome.code == 0, outcome.err
    assert (document["metric"], document["by"], document["steps"]) == ("fisher", by, STEPS)
    assert document["rows"]
    for row in document["rows"]:
        assert all(len(row[statistic]) == 3 for statistic in ("mean", "p50", "p99"))


def test_sensitivity_has_several_groupings_in_one_document(cli, small_run, made_archive):
    for path, restored in ((small_run, False), (made_archive, True)):
        document = cli("sensitivity", path, "--by", "tensor,layer_type", "--json").document
        single = cli("sensitivity", path, "--by", "layer_type", "--json").document
        assert document["restored"] is restored
        assert [table["by"] for table in document["tables"]] == ["tensor", "layer_type"]
        assert document["tables"][1]["rows"] == single["rows"]
    outcome = cli("sensitivity", small_run, "--by", "tensor,block")
    assert outcome.out.count("metric ") == 2


def test_sensitivity_of_the_first_step_has_no_update(cli, small_run):
    document = cli("sensitivity", small_run, "--metric", "update", "--json").document
    assert document["rows"][0]["mean"][0] is None
    assert document["rows"][0]["mean"][1] > 0
    assert "–" in cli("sensitivity", small_run, "--metric", "update").out


def test_sensitivity_says_where_gradients_come_from(cli, small_run, made_archive):
    for path in (small_run, made_archive):
        outcome = cli("sensitivity", path, "--metric", "taylor", "--json")
        assert outcome.document["sources"] == ["exp_avg"] * 3, outcome.err
    assert "in place of the gradient" in cli("sensitivity", small_run, "--metric", "taylor").out


def test_inspect_names_a_run_as_it_was_named(cli, small_run):
    pattern = f"{small_run}/step_{{step}}.pt"
    assert cli("inspect", pattern).out.splitlines()[0].split() == ["run", pattern]


def test_ui_hands_its_options_to_the_explorer(cli, small_run, tmp_path, monkeypatch):
    called = {}

    class Launch:
        @staticmethod
        def run(path, **options):
            called.update(options, path=path)

    monkeypatch.setitem(sys.modules, "inshrink_app.launch", Launch)
    assert cli("ui", small_run, "--port", 8600, "--root", tmp_path, "--no-browser").code == 0
    assert called == {
        "path": str(small_run),
        "host": "127.0.0.1",
        "port": 8600,
        "roots": [str(tmp_path)],
        "open_browser": False,
        "window": False,
    }


@pytest.mark.parametrize("words", [("--json",), ("--quiet",), ("--progress", "jsonl"), ("--port", "0")])
def test_ui_refuses_what_it_cannot_do(cli, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "inshrink_app.launch", None)
    outcome = cli("ui", *words)
    assert outcome.code == 2
    assert words[0] in outcome.err


def test_a_console_script_and_a_module_are_the_same_command():
    by_module = subprocess.run(
        [sys.executable, "-P", "-m", "inshrink_core.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert by_module.stdout.startswith("inshrink ")


@pytest.mark.parametrize(
    "verb",
    [
        *("compress", "restore", "verify", "compare", "estimate", "export", "prune"),
        *("sensitivity", "bench", "rehearse", "search"),
    ],
)
def test_every_verb_that_encodes_or_decodes_chooses_the_device_by_itself(cli, verb):
    text = " ".join(cli(verb, "--help").out.split())
    assert "--device auto|cpu|cuda" in text
    assert "[default: auto]" in text.split("--device auto|cpu|cuda")[1].split(" --")[0]


def test_the_report_names_the_device_that_was_used(cli, small_run, tmp_path):
    import torch

    used = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"MB/s on {used}" in cli("compress", small_run, "-o", tmp_path / "a.inshrink").out
    assert cli("compress", small_run, "-o", tmp_path / "b", "--json").document["device"] == used
    assert (
        cli("compress", small_run, "-o", tmp_path / "c", "--device", "cpu", "--json").document["device"]
        == "cpu"
    )


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


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(cli, archive, tmp_path):
    outcome = cli("restore", archive, "-o", tmp_path / "out", "--device", "abacus")
    assert outcome.code == 2
    assert "--device abacus is not a device" in outcome.err
    assert not (tmp_path / "out").exists()


def test_compress_and_restore_leave_the_processors_to_their_own_workers(cli, small_run, archive, tmp_path):
    for words in (
        ("compress", small_run, "-o", tmp_path / "a.inshrink"),
        ("restore", archive, "-o", tmp_path),
    ):
        torch.set_num_threads(2)
        assert cli(*words).code == 0
        assert torch.get_num_threads() == 1
