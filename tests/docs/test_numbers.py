"""Every number of README stands in a committed results file, and its figure is drawn from them."""

import csv
import re
from pathlib import Path

from benchmarks import figure
from benchmarks.results import RESULTS

README = (Path(__file__).parents[2] / "README.md").read_text()


def rows(name, **chosen):
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if all(row[key] == item for key, item in chosen.items())]
    assert found, (name, chosen)
    return found


def percents(value):
    return f"{100 * value:.2f} %"


def test_every_number_of_the_readme_is_in_a_results_file():
    largest = max(rows("sizes"), key=lambda row: int(row["parameters"]))
    judging = rows("controlled", tuned_on="False")
    restored = rows("unseen_data", tuned_on="False")
    ratios = [float(row["ratio_total"]) for row in judging]
    excesses = [float(row["excess"]) for row in judging]
    (bound,) = {float(row["max_restore_cost"]) for row in judging}
    (restores,) = {row["restores"] for row in judging}
    assert (len(judging), len(figure.points()), restores) == (7, 2, "9")
    assert {row["task"] for row in restored} == {row["task"] for row in judging}
    known = {
        *(
            f"{int(largest[key]) / int(largest['seeds']) / 1e9:.2f} GB"
            for key in ("raw_bytes", "archive_bytes")
        ),
        percents(float(largest["excess"])),
        percents(max(float(row["excess"]) for row in rows("sizes"))),
        f"{100 * bound:g} %",
        f"{min(ratios):.1f} to {max(ratios):.1f} times",
        percents(-min(excesses)),
        percents(max(excesses)),
    }
    output = set(re.findall(r"\d[\d.]* (?:to [\d.]+ )?(?:%|×|GB|times)", README.replace("**", "")))
    assert output == known
    assert f"{round(int(largest['parameters']) / 1e6)} million parameters" in README


def test_figures_are_those_that_the_results_give():
    for name, draw in figure.FIGURES.items():
        assert (figure.IMAGES / f"{name}.svg").read_text() == draw()
