"""``inshrink rehearse`` from the outside."""

from benchmarks import documents
from inshrink_lab.rehearsal import Rehearsal


def test_json_has_every_figure_and_each_is_documented(cli, task, tmp_path):
    outcome = cli("rehearse", task, "-o", tmp_path / "out", "--codec", "lossless", "--seeds", 2, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["excess"] == document["excess_half_width"] == 0.0
    assert document["uninterrupted"] == document["restored"]
    assert document["restored_at"] == [4, 8]
    assert len(document["curves"]) == 2
    documented = documents.rows_of(Rehearsal).keys()
    assert set(document) | {f"curves[].{key}" for key in document["curves"][0]} <= documented
