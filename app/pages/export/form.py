"""The controls of an export: which steps, how much of them, and how they are written."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject, engine_settings, toml_text
from inshrink_app.pages.export import layers
from inshrink_app.services import ExportRequest
from inshrink_app.widgets import choices, fmt, modules
from inshrink_app.widgets.layout import section

_KINDS = {"all": "All steps", "range": "A range", "step": "One step"}
_CODEC_HELP = (
    "Lattice is the default: smallest at equal accuracy. Inshrinkerator is the published codec. Uniform "
    "rounds to even spacings. Lossless keeps every bit."
)
_OPTIMIZERS = ("exact", "compressed", "compact")
_LAYOUTS = {"packed": "Packed archive", "safetensors": "safetensors"}
_GRADES = {"ratio": "By ratio", "size": "By size", "exact": "Every bit"}
_DTYPES = {"same": "As they are", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_MOST_LISTED = 500
_CODEC = "codec"
_DROP, _YES, _NO = "drop", "yes", "no"
_WHAT = "what"


def show(shown: Subject) -> ExportRequest:
    """Draw the controls and return what they ask for."""
    with section("What to export"):
        return _asked(shown).on(choices.device("export"))


def _asked(shown: Subject) -> ExportRequest:
    """Draw what depends on what is on screen."""
    what = choices.one_of_few("export", "Steps", _WHAT, _KINDS, "all")
    if what == "step":
        return _one_step(shown)
    if shown.kind == "archive":
        if what == "range":
            st.info(
                "To keep a range of an archive, prune it on the Archive page. A range of the original "
                "run can be exported here.",
                icon=":material/info:",
            )
            return dataclasses.replace(services.pack_export(shown), steps=())
        return services.pack_export(shown)
    return _chain(shown, _range(shown) if what == "range" else shown.steps)


def _range(shown: Subject) -> tuple[int, ...]:
    """Draw the ends of a range and its stride."""
    if len(shown.steps) < 2:
        st.caption("The run has one checkpoint.")
        return shown.steps
    first, last = choices.ends_of_range("export", shown.steps)
    tip = "1 takes all of them."
    stride = st.number_input("Every n-th checkpoint", 1, len(shown.steps), 1, key="export.stride", help=tip)
    inside = [step for step in shown.steps if first <= step <= last]
    return tuple(inside[:: int(stride)])


def _one_step(shown: Subject) -> ExportRequest:
    """Draw what concerns one step: which, and whether it is to begin another training from."""
    step = shown.steps[-1]
    if len(shown.steps) > 1:
        step = st.select_slider("Step", shown.steps, step, format_func=fmt.count, key="export.step")
    weights_only = st.toggle(
        "Weights only, for transfer learning",
        value=True,
        key="export.weights_only",
        help="Leaves out optimizer and training state; config and tokenizer files stay.",
    )
    return services.step_export(shown, step, **(_weights(shown) if weights_only else {}))


def _weights(shown: Subject) -> dict[str, Any]:
    """Draw which layers, in what form and how coarse; return it by the engine's names."""
    names = [row.name for row in shown.model_tensors]
    # What holds all of them is no choice: to keep it is the default, and without it nothing is left.
    parts = [node for node in modules.outline(names, modules.TENSOR) if len(node.members) < len(names)]
    listed = [node.name for node in sorted(parts, key=lambda node: node.depth)][:_MOST_LISTED]
    fields: dict[str, Any] = {"weights_only": True}
    for field, key, label, tip in (
        ("tensors", layers.KEEP, "Keep", "All layers, where nothing is named."),
        ("without", layers.LEAVE_OUT, "Leave out", "As the head, where the rest goes on to another task."),
    ):
        picked = choices.pick_several(
            label,
            list(dict.fromkeys([*listed, *st.session_state.get(key, ())])),
            key=key,
            placeholder="A layer",
            help=f"{tip} A module stands for all in it. The list of layers beside adds what is picked there, "
            "and all that match a pattern.",
        )
        fields[field] = tuple(picked)
    fields["layout"] = layout = choices.one_of_few("export", "Form", "form", _LAYOUTS, "packed")
    grades = {name: _GRADES[name] for name in _GRADES if layout == "packed" or name != "size"}
    grade = choices.one_of_few(
        "export", "Values", f"values_{layout}", grades, "ratio" if layout == "packed" else "exact"
    )
    if grade == "ratio":
        label = "Times smaller than float32, at least"
        fields["ratio"] = st.slider(label, 2.0, 32.0, 8.0, 0.5, key="export.ratio")
        if layout != "packed":
            st.caption(
                "The values are as coarse as such a packed file has them; the plain file is no smaller."
            )
    elif grade == "size":
        eighth = round(0.5 * shown.n_parameters / 1e6, 3)  # of the weights as float32
        megabytes = st.number_input(
            "At most, MB", 0.001, None, max(0.001, eighth), format="%.3f", key="export.size"
        )
        fields["size"] = round(1e6 * megabytes)
    else:
        fields["exact"] = True
    if layout != "packed":
        fields["dtype"] = choices.one_of_few("export", "Floats as", "dtype", _DTYPES, "same")
    return fields


def _chain(shown: Subject, steps: tuple[int, ...]) -> ExportRequest:
    """Draw how a chain is written."""
    codec, config = _carried(shown) or _codec()
    has_optimizer = len(shown.model_tensors) < len(shown.tensors)
    optimizer = "drop"
    dropped = has_optimizer and _is_dropped()
    if has_optimizer and not dropped:
        default = services.default_optimizer(codec, config)
        optimizer = str(
            choices.pick_one(
                "Optimizer state",
                _OPTIMIZERS,
                index=_OPTIMIZERS.index(default),
                format_func=str.capitalize,
                # What is the default depends on it: weights that stay exact have exact state beside them.
                key=f"export.optimizer.{default}",
                help="Compressed rounds each second moment to a power of two; shaped also rounds first "
                "moments more coarsely where the loss is flat, which takes longer; compact keeps only "
                "factors of rows and columns. All are much smaller. Training goes on from them, not bit "
                "for bit.",
            )
        )
        if optimizer != "exact":
            st.caption("A training resumed from it goes on, but not bit for bit; from exact state it does.")
    elif has_optimizer:
        st.caption("Without optimizer state, training cannot go on without warming the optimizer up.")
    watch = steps == shown.steps and st.toggle(
        "Keep archiving while the run grows",
        value=False,
        key="export.watch",
        help="Archives each checkpoint as it is finished, until you end the job or the explorer.",
    )
    packed = not watch and st.toggle(
        "As one packed file",
        value=False,
        key="export.packed",
        help="One file can be downloaded and handed on. A folder can be appended to.",
    )
    keyframe_every = st.number_input(
        "Frames from one keyframe to the next",
        1,
        1000,
        32,
        key="export.keyframe_every",
        help="Restoring a step decodes at most so many frames; keyframes are larger than deltas.",
    )
    tip = "Each compresses some of the tensors, one thread each."
    fields: dict[str, Any] = {"codec": codec, "config": config or None, "optimizer": optimizer}
    fields["keyframe_every"] = int(keyframe_every)
    if not watch:
        fields["engine"], fields["workers"] = choices.engine("export", tip)
    return services.chain_export(shown, steps, packed=packed, watch=watch, **fields)


def _is_dropped() -> bool:
    """Draw whether optimizer state is left out; as a link says it to begin with."""
    dropped = st.toggle("Weights only", value=state.choice_text(_DROP) == _YES, key="export.drop")
    state.publish(**{_DROP: _YES if dropped else _NO})
    return dropped


def _codec() -> tuple[str, dict[str, Any]]:
    """Draw which codec, and the one setting of it."""
    names = choices.codec_labels()
    codec = choices.one_of_many("export", "Codec", _CODEC, names, next(iter(names)), _CODEC_HELP)
    return codec, choices.ask_for_knob(codec, "export")


def _carried(shown: Subject) -> tuple[str, dict[str, Any]] | None:
    """Draw what was carried on for this run; return codec and settings, None where nothing was."""
    config = _told(shown)
    if config is None:
        return None
    st.caption("Configuration from the page Allocate")
    st.code(toml_text(config), language=None, wrap_lines=True)
    if st.button("Choose settings here instead", icon=":material/close:", type="tertiary"):
        state.retract(state.CARRIED)
        st.rerun()
    return str(config["codec"]), engine_settings(config)


def _told(shown: Subject) -> dict[str, Any] | None:
    """Read what is in the session; a link may say it too, and is not trusted to say sense."""
    try:
        told = json.loads(state.choice_text(state.CARRIED))
        config = told["config"]
        if told["run"] != str(shown.path) or not isinstance(config["codec"], str):
            return None
        if not isinstance(config.get("settings", {}), dict):
            return None
        overrides = config.get("override", [])
        if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(config)
