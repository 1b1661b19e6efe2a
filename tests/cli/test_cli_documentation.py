"""What docs/cli.md and docs/json.md promise is what the commands take and emit."""

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks import reference
from inshrink_core.cli.application import known_verbs

DOCS = Path(__file__).parents[2] / "docs"
VERBS = tuple(known_verbs())
SCHEMA = json.loads((DOCS / "documents.schema.json").read_text())


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("inspect", ("{run}",)),
        ("inspect", ("{archive}",)),
        ("inspect", ("{junk}",)),
        ("compress", ("{run}", "-o", "{archive}")),
        ("compress", ("{run}", "-o", "{out}", "--steps", "50", "--base", "{run}@25")),
        ("compress", ("{run}", "-o", "{out}", "--steps", "25,50", "--part", "1/2")),
        ("commit", ("{archive}",)),
        ("restore", ("{archive}", "-o", "{out}")),
        ("release", ("{run}", "{archive}")),
        ("verify", ("{archive}", "--against", "{run}")),
        ("verify", ("{run}",)),
        ("compare", ("{archive}", "--against", "{run}", "--trust-run", "--steps", "25")),
        ("sensitivity", ("{run}", "--by", "layer_type")),
        ("compress", ("{run}", "-o", "{out}", "--max-drop", "0.01", "--trust-run", "--steps", "25,50")),
        ("average", ("{archive}", "--steps", "25,50", "-o", "{out}")),
        ("estimate", ("{run}", "--steps", "25,50")),
        ("evaluate", ("{run}", "--trust-run")),
        ("evaluate", ("{run}", "--write", "{out}.py")),
        ("estimate", ("{run}", "--steps", "25,50", "--try", "2", "--each", "optimizer=drop", "--by-tensor")),
        (
            "search",
            ("{run}", "--max-drop", "0.05", "--trust-run", "--steps", "25", "-o", "{out}", "--budget", "2"),
        ),
        ("bench", ("{run}", "--codecs", "uniform:bits=8", "--steps", "25,50", "-o", "{out}")),
        ("rehearse", ("{task}", "-o", "{out}", "--codec", "lossless", "--seeds", "1")),
        ("export", ("{archive}", "-o", "{out}", "--weights-only", "--step", "50")),
        ("export", ("{archive}", "--pack", "{out}")),
        ("prune", ("{archive}", "--keep-last", "2")),
        ("compress", ("{run}", "-o", "{archive}", "--watch", "--poll", "0.05", "--until", "25")),
    ],
)
def test_every_key_of_a_document_is_in_the_schema(cli, archive, small_run, task, tmp_path, verb, words):
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "step_1.pt").write_bytes(b"PK")
    places = {"run": small_run, "archive": archive, "out": tmp_path / "out", "junk": junk, "task": task}
    outcome = cli(verb, *(word.format(**places) for word in words), "--json")
    assert outcome.document
    jsonschema.validate(outcome.document, SCHEMA | {"$ref": f"#/$defs/{verb}"})


def test_the_schema_is_that_of_the_reports_and_refuses_other_documents(cli, made_archive, tmp_path):
    assert (DOCS / "documents.schema.json").read_text() == reference.schema(), "run make reference"
    assert set(SCHEMA["$defs"]) == set(VERBS) - {"ui"}
    valid = jsonschema.Draft202012Validator(SCHEMA | {"$ref": "#/$defs/restore"}).is_valid
    document = cli("restore", made_archive, "-o", tmp_path / "out", "--json").document
    assert valid(document)
    assert not valid(document | {"steps": ["one"]})
    assert not valid(document | {"stray": 1})
    assert not valid({key: value for key, value in document.items() if key != "files"})


@pytest.mark.parametrize("name", ["cli.md", "json.md", "format.md"])
def test_derived_parts_of_a_page_are_those_of_the_code(name):
    assert reference.page(name) == (DOCS / name).read_text(), "run make reference"
