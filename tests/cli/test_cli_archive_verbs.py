"""The verbs about archives as wholes: export, prune and the watch, as a shell sees them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inshrink_core
from tests.cli.conftest import SAMPLE
from tests.cli.test_cli_documentation import DOCS, keys_of, section

STEPS = (10, 25, 50, 100, 150)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    target = tmp_path_factory.mktemp("made") / "digits.inshrink"
    inshrink_core.compress(SAMPLE, target, steps=STEPS, codec="lossless")
    return target


@pytest.fixture
def archive(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "digits.inshrink"))


def documented(verb):
    return set(re.findall(r"^\| `([^`]+)` \|", section(verb), flags=re.MULTILINE))


def emitted(document):
    """Return the keys of a document; what stands below `layers` are names."""
    layers = document.pop("layers", {})
    keys = set(keys_of(document))
    return keys | {f"layers{{}}.{key}" for row in layers.values() for key in row}


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("export", ("{archive}", "-o", "{out}", "--weights-only", "--step", "50")),
        ("export", ("{archive}", "--pack", "{out}")),
        ("prune", ("{archive}", "--keep-last", "2")),
        ("compress", ("{run}", "-o", "{archive}", "--watch", "--poll", "0.05", "--until", "25")),
    ],
)
def test_every_key_of_a_document_is_documented(cli, archive, tmp_path, verb, words):
    places = {"run": SAMPLE, "archive": archive, "out": tmp_path / "out"}
    outcome = cli(verb, *(word.format(**places) for word in words), "--json")
    assert outcome.code == 0, outcome.err
    found = {key for key in emitted(outcome.document) if not key.startswith("config")}
    assert found
    assert found <= documented(verb)


@pytest.mark.parametrize("verb", ["export", "prune"])
def test_help_and_docs_name_the_same_options(cli, verb):
    text = (DOCS / "cli.md").read_text()
    described = text.split("\n## inspect")[0] + text.split(f"\n## {verb}\n")[1].split("\n## ")[0]
    help_text = cli(verb, "--help").out
    assert f"$ inshrink {verb} " in help_text.split("Example:")[1]
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text)):
        assert f"`{option}" in described or f"{option} " in described, option


def test_model_is_handed_on_in_two_commands(cli, archive, tmp_path):
    model = tmp_path / "model.inshrink"
    outcome = cli("export", archive, "--step", "100", "--weights-only", "-o", model)
    assert outcome.code == 0, outcome.err
    assert re.search(r"ratio float32 +[\d.]+×", outcome.out)
    assert re.search(r"relative error +\d", outcome.out)
    assert cli("restore", model, "--format", "safetensors", "-o", tmp_path / "model").code == 0
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert cli("verify", model, "--deep").code == 0


def test_archive_behind_a_url_is_inspected_and_restored(cli, archive, tmp_path):
    url = f"file://{archive}"
    assert cli("inspect", url, "--json").document["steps"] == list(STEPS)
    assert cli("verify", url).code == 0
    assert cli("restore", url, "--step", "25", "-o", tmp_path / "out").code == 0
    missing = cli("inspect", f"file://{tmp_path}/nothing")
    assert (missing.code, missing.out) == (2, "")
    unknown = cli("inspect", "nowhere://bucket/x")
    assert unknown.code == 2
    assert "no object storage of the name 'nowhere'" in unknown.err


def test_prune_shows_a_plan_and_does_it_when_told(cli, archive):
    plan = cli("prune", archive, "--keep-every", "50", "--keep", "25:30")
    assert plan.code == 0
    assert "nothing was changed: add --apply to do it" in plan.out
    assert re.search(r"removed +10\b", plan.out)
    assert inshrink_core.open(archive).steps == STEPS
    done = cli("prune", archive, "--keep-every", "50", "--keep", "25:30", "--apply", "--json")
    assert done.document["removed"] == [10]
    assert done.document["rekeyed"] == [25]
    assert inshrink_core.open(archive).steps == STEPS[1:]
    assert cli("verify", archive, "--deep", "--against", SAMPLE / "step_000[01]*").code == 0
    again = cli("prune", archive, "--keep-every", "25", "--apply")
    assert "nothing to remove" in again.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "{archive}"), "say what to make"),
        (("export", "{archive}", "-o", "{out}", "--pack", "{out}"), "say what to make"),
        (("export", "{archive}", "--pack", "{out}", "--weights-only"), "copy the whole archive"),
        (("export", "{archive}", "-o", "{out}", "--exact"), "--weights-only"),
        (("export", "{archive}", "-o", "{out}", "--weights-only", "--exact", "--ratio", "9"), "exclude"),
        (("export", "{archive}", "-o", "{out}", "--step", "11"), "no frame of step 11"),
        (("export", "{run}", "-o", "{out}"), "not an Inshrink archive"),
        (("export", "{archive}", "--unpack", "{archive}"), "exists already"),
        (("prune", "{archive}"), "nothing says what to keep"),
        (("prune", "{archive}", "--keep", "11"), "no frame of step 11"),
        (("prune", "{archive}", "--keep-every", "0"), "--keep-every"),
        (("prune", "{run}", "--keep-last", "1"), "not an Inshrink archive"),
        (("compress", "{run}", "-o", "{out}", "--until", "5"), "--watch"),
        (
            ("compress", "{run}", "-o", "{out}", "--watch", "--steps", "10"),
            "--watch and --steps exclude",
        ),
        (("compress", "{out}", "-o", "{out}2", "--watch"), "no such directory"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(cli, archive, tmp_path, words, message):
    places = {"run": SAMPLE, "archive": archive, "out": tmp_path / "out"}
    outcome = cli(*(word.format(**places) for word in words))
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_inspecting_a_packed_archive_imports_neither_torch_nor_numba_nor_fsspec(cli, archive, tmp_path):
    cli("export", archive, "--pack", tmp_path / "p", "--quiet")
    script = (
        "import sys; from inshrink_core.cli import main;"
        f"code = main(['inspect', {str(tmp_path / 'p')!r}, '--quiet']);"
        "print(code, [m for m in ('torch', 'numba', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"
