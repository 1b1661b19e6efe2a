"""Failure rehearsal: training restored from its archive again and again, against training that is not.

Three tasks (a GPT with AdamW, gated convolutions with SGD and with AdamW), five seeds, nine restores; lattice
and Inshrinkerator over their knobs, the control (lossless, which ends at exactly zero), 5 and 19 restores,
chains under a bound of drop or divergence, the optimizer's state from the archive, and what lattice loses
without its parts: no delta (every frame a keyframe), no sensitivity (one step for all tensors), gain
matched by row, and not at all; and other settings of gamma. ``results/rehearsal.csv`` has a row a setting,
and ``results/rehearsal_lead.csv`` the ratio of each codec at equal mean excess, interpolated between its
settings.

Finished trainings are kept in ``data/rehearsal`` and not run again, also those of ``inshrink rehearse
TASK --output benchmarks/data/rehearsal``. ``--kept`` writes rows from what is kept and trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import inshrink_core
from benchmarks.interpolation import ratio_at_excess
from benchmarks.results import DATA, write
from inshrink_core.codec import codec_names, get_codec, make_codec
from inshrink_core.lab.rehearsal import Rehearsal, pair_trainings
from inshrink_core.lab.results import TrainingResult, parse_training
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE

FOLDER = DATA / "rehearsal"
TASKS = ("char-conv", "char-conv-adamw", "char-gpt")
QUICK_TASK = "digits-cnn"
"""Seconds a training; its seeds differ too much for what `TASKS` are asked."""
SEEDS = 5
EXCESSES = (0.003, 0.01)
FEWEST_SEEDS = 3
"""A mean of fewer pairs says little: such settings have no row."""


class Setting(NamedTuple):
    """How frames are written, and how often training fails.

    Optimizer state is exact where nothing else is said, whatever `inshrink rehearse` does by default.
    """

    codec: str
    config: Mapping[str, Any] = {}
    optimizer: str = "exact"
    restores: int = 9
    keyframe_every: int = 32
    max_drop: float | None = None
    max_divergence: float | None = None


SETTINGS = (
    Setting("lossless"),
    Setting("lattice", optimizer="compressed"),
    *(Setting("lattice", {"coarseness": coarseness}) for coarseness in (4, 2.5, 6, 1.5, 9)),
    *(Setting("inshrinkerator", {"bins": bins}) for bins in (32, 16, 10, 6)),
    *(Setting("inshrinkerator", {"bins": bins, "entropy": "rans"}) for bins in (32, 16, 10, 6)),
    *(Setting("lattice", {"coarseness": 4, "gamma": gamma}) for gamma in (0.5, 1)),
    *(Setting("lattice", {"coarseness": 4}, restores=restores) for restores in (5, 19)),
    *(Setting("inshrinkerator", restores=restores) for restores in (5, 19)),
    Setting("lattice", {"coarseness": 2.5}, max_drop=0.01),
    *(
        Setting("lattice", {"coarseness": 2.5}, max_divergence=bound)
        for bound in (DEFAULT_MAX_DIVERGENCE, 0.01)
    ),
    Setting("lattice", {"coarseness": 4}, optimizer="compressed"),
    Setting("lattice", {"coarseness": 4}, keyframe_every=1),
    Setting("lattice", {"coarseness": 4, "sensitivity": 0}),
    Setting("lattice", {"coarseness": 4, "gain_per": "row"}),
    Setting("lattice", {"coarseness": 4, "gain_per": "none"}),
)


def rehearse(task: str, setting: Setting, seeds: int) -> Rehearsal:
    """Run what of a setting is not kept."""
    result = inshrink_core.rehearse(
        task,
        FOLDER,
        codec=setting.codec,
        config=setting.config,
        optimizer=setting.optimizer,
        seeds=seeds,
        restores=setting.restores,
        keyframe_every=setting.keyframe_every,
        max_drop=setting.max_drop,
        max_divergence=setting.max_divergence,
    )
    sys.stderr.write(f"{task}, {setting}: {result.ratio_weights}, excess {result.excess}\n")
    return result


def row_of(rehearsal: Rehearsal, keyframe_every: int) -> dict[str, object]:
    """Return the row of a rehearsal."""
    return {
        "task": rehearsal.task,
        "codec": rehearsal.codec,
        "setting": setting_text(rehearsal.codec, rehearsal.config, keyframe_every) + _bounds_text(rehearsal),
        "optimizer": rehearsal.optimizer,
        "restores": len(rehearsal.restored_at),
        "seeds": len(rehearsal.restored),
        "ratio_weights": rehearsal.ratio_weights,
        "ratio_total": rehearsal.ratio_total,
        "excess": rehearsal.excess,
        "excess_half_width": rehearsal.excess_half_width,
        "noise": rehearsal.noise,
    }


def setting_text(codec: str, config: Mapping[str, Any], keyframe_every: int) -> str:
    """Return what of a setting is not the default."""
    default = _defaults(codec)
    changed = {name: value for name, value in config.items() if value != default[name]}
    if keyframe_every != Setting("").keyframe_every:
        changed["keyframe_every"] = keyframe_every
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "default"


def _bounds_text(rehearsal: Rehearsal) -> str:
    """Return the bounds that every save was promised to keep, if any."""
    promise = rehearsal.restored[0].promise
    bounds = promise["bounds"] if promise is not None else {}
    return "".join(f", {name} <= {value}" for name, value in bounds.items() if value is not None)


def kept_trainings(folder: Path) -> list[tuple[dict[str, Any], TrainingResult]]:
    """Return the key and the result of every kept training whose bytes this version would write."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        key, values = document["key"], document["result"]
        if "codec" in key:
            if not _is_current(key):
                continue
            # A setting that is newer than the training stood at its default.
            key["config"] = _defaults(key["codec"]) | key["config"]
        found.append((key, parse_training(values)))
    return found


def _is_current(key: Mapping[str, Any]) -> bool:
    """Whether a restored training used a codec and settings as they are today."""
    if key["codec"] not in codec_names() or key["bitstream"] != get_codec(key["codec"]).bitstream:
        return False
    return set(key["config"]) <= set(_defaults(key["codec"]))


def _defaults(codec: str) -> dict[str, Any]:
    return dataclasses.asdict(make_codec(codec, {}))


def assemble(trainings: Iterable[tuple[dict[str, Any], TrainingResult]]) -> list[tuple[Rehearsal, int]]:
    """Pair restored and uninterrupted trainings by seed, setting by setting, with `keyframe_every`."""
    return [
        (found, key["keyframe_every"])
        for key, found in pair_trainings(trainings)
        if len(found.restored) >= FEWEST_SEEDS
    ]


def leads(rehearsals: Iterable[tuple[Rehearsal, int]]) -> list[dict[str, object]]:
    """Return the ratio of each codec at equal mean excess: nine restores, exact optimizer state."""
    sweeps: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one, keyframe_every in rehearsals:
        text = setting_text(one.codec, one.config, 32)
        if (
            any(name in text for name in ("sensitivity", "gain_per", "gamma"))
            or one.restored[0].promise is not None
            or keyframe_every != 32
            or len(one.restored_at) != 9
            or one.optimizer != "exact"
        ):
            continue
        if one.excess is not None and one.ratio_weights is not None:
            entropy = one.config.get("entropy")
            codec = f"{one.codec}, {entropy}" if entropy else one.codec
            sweeps[one.task, codec].append((one.excess, one.ratio_weights))
    return [
        {"task": task, "excess": excess, "codec": codec, "ratio_weights": ratio_at_excess(points, excess)}
        for (task, codec), points in sorted(sweeps.items())
        for excess in EXCESSES
        if codec != "lossless"
    ]


def main(quick: bool = False, kept_only: bool = False) -> Path:
    """Write ``results/rehearsal.csv``; quick: one seed of the small task, four restores."""
    if quick:
        settings = (Setting("lattice", {"coarseness": 4}, restores=4), Setting("inshrinkerator", restores=4))
        return write("rehearsal_quick", [row_of(rehearse(QUICK_TASK, one, 1), 32) for one in settings])
    for task in () if kept_only else TASKS:
        for setting in SETTINGS:
            rehearse(task, setting, SEEDS)
    found = assemble(kept_trainings(FOLDER / "results"))
    found.sort(
        key=lambda pair: (
            pair[0].task,
            pair[0].codec,
            -len(pair[0].restored),
            json.dumps(pair[0].config, sort_keys=True),
        )
    )
    lead_rows = leads(found)
    if lead_rows:
        write("rehearsal_lead", lead_rows)
    return write("rehearsal", [row_of(*pair) for pair in found])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kept", action="store_true", help="write what is kept, train nothing")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.kept)
