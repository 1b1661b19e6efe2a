"""Figures of README and docs, drawn from committed results: ``python -m benchmarks.figure``.

``ratio``: ratio of the weights against the largest restore cost of twenty saves, one panel a judging task:
the settings of ``results/promise.csv`` that were tried of every codec, and the saver that checks each save.
Tasks are those with every codec and no part in choosing a default. ``sizes``: ratio, excess and speed against
the number of parameters, from ``results/sizes.csv`` and ``sizes_speed.csv``. ``docs/images/NAME.svg`` is for
light pages, ``ratio-dark.svg`` for dark ones; a test compares them with what this draws.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.results import RESULTS

IMAGES = RESULTS.parents[1] / "docs" / "images"
BOUND = 0.003
CODECS = ("lattice", "inshrinkerator", "excp")
AS_PUBLISHED = {"inshrinkerator": "bins 32, embedding_bins 32", "excp": "bits 4"}
CHECKED = "checked True"
MODELS = {"denoise": "diffusion model, Adam", "regression": "perceptron, Adam"}

WIDTH, HEIGHT = 880, 312
TOP, BOTTOM, LEFT, GAP, PANEL = 62, 262, 62, 52, 372
COSTS = (1e-4, 1e-3, 1e-2)
FIRST, LAST = 2e-5, 4e-2
HIGHEST = 32
SIZES_PANEL, SIZES_GAP = 222, 74


@dataclass(frozen=True)
class Theme:
    """Colours of a page's ground, text, rules and codecs."""

    ground: str
    text: str
    muted: str
    rule: str
    codecs: tuple[str, str, str]


LIGHT, DARK = (
    Theme("#ffffff", "#1f2328", "#59636e", "#e4e7eb", ("#1a6fd6", "#c4500c", "#7a5195")),
    Theme("#0d1117", "#f0f6fc", "#9198a1", "#2a313c", ("#6cb0ff", "#f0883e", "#c297e0")),
)


def points() -> dict[str, dict[str, list[tuple[str, float, float]]]]:
    """Return setting, largest cost and ratio of the weights, by judging task and codec."""
    found: dict[str, dict[str, list[tuple[str, float, float]]]] = {}
    with (RESULTS / "promise.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["tuned_on"] == "False":
                codec = found.setdefault(row["task"], {}).setdefault(row["codec"], [])
                codec.append((row["setting"], float(row["largest_cost"]), float(row["ratio_weights"])))
    return {task: codecs for task, codecs in found.items() if {*CODECS} <= codecs.keys()}


def _text(
    x: float, y: float, text: str, fill: str, *, anchor: str = "start", size: int = 12, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    look = f'fill="{fill}" font-size="{size}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{text}</text>'


def _diamond(x: float, y: float, fill: str, stroke: str) -> str:
    return (
        f'<path d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z" fill="{fill}" stroke="{stroke}" stroke-width="2"/>'
    )


def _circle(x: float, y: float, radius: int, fill: str, stroke: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{stroke}" stroke-width="2"/>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, stroke: str, more: str = "") -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{stroke}" {more}/>'


def _panel(
    left: float, task: str, codecs: dict[str, list[tuple[str, float, float]]], theme: Theme
) -> list[str]:
    def across(cost: float) -> float:
        return left + PANEL * math.log(cost / FIRST) / math.log(LAST / FIRST)

    def up(ratio: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * ratio / HIGHEST

    drawn = [_text(left, TOP - 16, f"{task}: {MODELS[task]}", theme.text, size=13, bold=True)]
    for ratio in range(0, HIGHEST, 10):
        drawn.append(_line(left, up(ratio), left + PANEL, up(ratio), theme.rule))
        drawn.append(_text(left - 8, up(ratio) + 4, f"{ratio}×", theme.muted, anchor="end"))
    labels = ((across(cost), f"{100 * cost:g} %") for cost in COSTS)
    drawn += [_text(x, BOTTOM + 18, label, theme.muted, anchor="middle") for x, label in labels]
    drawn.append(_line(across(BOUND), TOP - 6, across(BOUND), BOTTOM, theme.muted, 'stroke-dasharray="3 4"'))
    drawn.append(_text(across(BOUND) + 5, BOTTOM - 8, f"bound {100 * BOUND:g} %", theme.muted, size=11))
    for codec, colour in zip(CODECS, theme.codecs, strict=True):
        drawn += _curve(codec, codecs[codec], colour, theme, across, up)
    return drawn


def _curve(
    codec: str,
    rows: Sequence[tuple[str, float, float]],
    colour: str,
    theme: Theme,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> list[str]:
    swept = sorted((cost, ratio, setting) for setting, cost, ratio in rows if setting != CHECKED)
    path = " ".join(f"{across(cost):.1f},{up(ratio):.1f}" for cost, ratio, _ in swept)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for cost, ratio, setting in swept:
        published = setting == AS_PUBLISHED.get(codec)
        fill = theme.ground if published else colour
        drawn.append(_circle(across(cost), up(ratio), 5 if published else 3, fill, colour))
    checked = [(cost, ratio) for setting, cost, ratio in rows if setting == CHECKED]
    return drawn + [_diamond(across(cost), up(ratio), colour, theme.ground) for cost, ratio in checked]


def _key(theme: Theme) -> list[str]:
    """Return what the marks mean."""
    y, x = 20.0, float(LEFT)
    drawn = []
    for name, colour in zip(("lattice (ours)", "Inshrinkerator", "ExCP"), theme.codecs, strict=True):
        drawn.append(_line(x, y - 4, x + 20, y - 4, colour, 'stroke-width="2"'))
        drawn.append(_text(x + 26, y, name, theme.text))
        x += 52 + 7.4 * len(name)
    drawn.append(_circle(x + 6, y - 4, 5, theme.ground, theme.muted))
    drawn.append(_text(x + 17, y, "as published", theme.text))
    x += 120
    drawn.append(_diamond(x + 6, y - 4, theme.codecs[0], theme.ground))
    drawn.append(_text(x + 19, y, "each save as coarse as its check allows", theme.text))
    return drawn


def draw_ratio(theme: Theme) -> str:
    """Return ratio against restore cost as SVG."""
    parts = _key(theme)
    tasks = points()
    for i, (task, codecs) in enumerate(sorted(tasks.items())):
        parts += _panel(LEFT + i * (PANEL + GAP), task, codecs, theme)
    middle = LEFT + PANEL + GAP / 2
    said = "largest restore cost of twenty saves: rise of the loss after a restore"
    parts.append(_text(middle, BOTTOM + 42, said, theme.text, anchor="middle"))
    parts.append(
        f'<text transform="translate(16 {(TOP + BOTTOM) / 2:.1f}) rotate(-90)" fill="{theme.text}" '
        'font-size="12" text-anchor="middle">ratio of the weights</text>'
    )
    return _svg("Ratio of the weights against the largest restore cost, on two judging tasks", parts, theme)


def sizes() -> list[dict[str, str]]:
    """Return the rows of ``results/sizes.csv`` with those of speed, the smallest model first."""
    tables: list[dict[str, dict[str, str]]] = []
    for name in ("sizes_speed", "sizes"):
        with (RESULTS / f"{name}.csv").open(newline="") as file:
            tables.append({row["parameters"]: row for row in csv.DictReader(file)})
    speeds, found = tables
    return sorted((speeds[key] | row for key, row in found.items()), key=lambda row: int(row["parameters"]))


def draw_sizes(theme: Theme) -> str:
    """Return ratio, excess and speed against the number of parameters as SVG."""
    rows = sizes()
    parameters = [int(row["parameters"]) for row in rows]
    millions = [f"{count / 1e6:.1f}" if count < 1e7 else f"{count / 1e6:.0f}" for count in parameters]
    low, high = math.log(min(parameters) / 1.3), math.log(max(parameters) * 1.3)
    first, second, _ = theme.codecs

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows]

    seeds = [[100 * excess for excess in json.loads(row["excesses"])] for row in rows]
    panels: list[tuple[str, str, Sequence[tuple[str, str, Sequence[Sequence[float]]]]]] = [
        (
            "ratio",
            "×",
            [
                ("of the weights", second, [[one] for one in column("ratio_weights")]),
                ("of everything", first, [[one] for one in column("ratio_total")]),
            ],
        ),
        (
            "excess after nine restores",
            " %",
            [
                ("by chance", second, [[100 * one] for one in column("chance")]),
                ("restored, each seed", first, seeds),
            ],
        ),
        (
            "speed, MB/s, one thread",
            "",
            [
                ("restore", second, [[one] for one in column("restore_mb_per_s")]),
                ("compress", first, [[one] for one in column("compress_mb_per_s")]),
            ],
        ),
    ]
    parts: list[str] = []
    for i, (title, unit, curves) in enumerate(panels):
        left = LEFT - 6 + i * (SIZES_PANEL + SIZES_GAP)
        values = [value for _, _, groups in curves for group in groups for value in group]
        step, ticks = _ticks(min(0.0, *values), max(0.0, *values))
        bottom, top = ticks[0], ticks[-1]

        def across(count: float, left: float = left) -> float:
            return left + SIZES_PANEL * (math.log(count) - low) / (high - low)

        def up(value: float, bottom: float = bottom, top: float = top) -> float:
            return BOTTOM - (BOTTOM - TOP) * (value - bottom) / (top - bottom)

        parts.append(_text(left, TOP - 38, title, theme.text, size=13, bold=True))
        x = left
        for name, colour, _ in reversed(curves):
            parts.append(_circle(x + 4, TOP - 20, 3, colour, colour))
            parts.append(_text(x + 12, TOP - 16, name, theme.muted, size=11))
            x += 28 + 5.8 * len(name)
        for value in ticks:
            parts.append(_line(left, up(value), left + SIZES_PANEL, up(value), theme.rule))
            label = f"{value:.{max(0, -math.floor(math.log10(step)))}f}{unit}".replace("-", "−")
            parts.append(_text(left - 6, up(value) + 4, label, theme.muted, anchor="end", size=11))
        for count, label in zip(parameters, millions, strict=True):
            parts.append(_text(across(count), BOTTOM + 18, label, theme.muted, anchor="middle", size=11))
        for _, colour, groups in curves:
            means = [sum(group) / len(group) for group in groups]
            path = " ".join(f"{across(n):.1f},{up(y):.1f}" for n, y in zip(parameters, means, strict=True))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for count, group in zip(parameters, groups, strict=True):
                parts += [_circle(across(count), up(value), 3, colour, colour) for value in group]
    middle = WIDTH / 2
    parts.append(_text(middle, BOTTOM + 42, "million parameters", theme.text, anchor="middle"))
    return _svg("Ratio, excess and speed against the number of parameters", parts, theme)


def _ticks(low: float, high: float) -> tuple[float, list[float]]:
    """Return a round step and its multiples that hold a range, three to seven of them."""
    rough = (high - low or 1.0) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough)
    return step, [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _svg(title: str, parts: Sequence[str], theme: Theme) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme.ground}"/>\n{body}\n</svg>\n'
    )


FIGURES: dict[str, Callable[[], str]] = {
    "ratio": partial(draw_ratio, LIGHT),
    "ratio-dark": partial(draw_ratio, DARK),
    "sizes": partial(draw_sizes, LIGHT),
}
"""What each picture's name draws."""


def main() -> None:
    """Write all pictures."""
    for name, draw in FIGURES.items():
        path = IMAGES / f"{name}.svg"
        path.write_text(draw())
        sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    main()
