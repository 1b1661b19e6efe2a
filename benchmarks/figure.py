"""The figure of README, drawn from committed results: ``python -m benchmarks.figure``.

Ratio of the weights against the largest restore cost of twenty saves, one panel per judging task: the
settings of every codec in ``results/unseen_data.csv``, and the saver that checks each save.
``docs/images/ratio.svg`` is for light pages, ``ratio-dark.svg`` for dark ones; a test compares them with what
this draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.results import RESULTS, read

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
    for row in read("unseen_data"):
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


def _mark(shape: str, fill: str, stroke: str) -> str:
    return f'<{shape} fill="{fill}" stroke="{stroke}" stroke-width="2"/>'


def _diamond(x: float, y: float, fill: str, stroke: str) -> str:
    return _mark(f'path d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z"', fill, stroke)


def _circle(x: float, y: float, radius: int, fill: str, stroke: str) -> str:
    return _mark(f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"', fill, stroke)


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
    caption = "largest restore cost of twenty saves: rise of the loss after a restore"
    parts.append(_text(middle, BOTTOM + 42, caption, theme.text, anchor="middle"))
    parts.append(
        f'<text transform="translate(16 {(TOP + BOTTOM) / 2:.1f}) rotate(-90)" fill="{theme.text}" '
        'font-size="12" text-anchor="middle">ratio of the weights</text>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">\n'
        "<title>Ratio of the weights against the largest restore cost, on two judging tasks</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme.ground}"/>\n{body}\n</svg>\n'
    )


FIGURES: dict[str, Callable[[], str]] = {
    "ratio": partial(draw_ratio, LIGHT),
    "ratio-dark": partial(draw_ratio, DARK),
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
