"""Automatic evaluator: it evaluates a transformers model on generated samples.

The restore cost is a divergence of predictions over their cross-entropy, and needs no labels. Inputs only
have to resemble the training's. A language model generates such inputs itself; an image model gets noise of a
known shape. The model is built from ``config.json``, only with classes of the installed `transformers`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.errors import InputError, InshrinkError, MissingExtraError, clipped
from inshrink_core.evaluate.evaluator import Prepared, write_state

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.formats import Run

AUTO: Final = "auto"
"""Name of this evaluator."""

_CONFIG: Final = "config.json"
_STATE: Final = "state.pt"
_MAX_CONFIG_BYTES: Final = 1 << 20

N_SEQUENCES: Final = 128
LENGTH: Final = 64
"""Number of sequences that a language model generates, and their length in tokens."""

_MAX_LOG_PROBS: Final = 1 << 26
"""Maximum number of predicted values: 256 MB. A large vocabulary gets fewer sequences."""
_LEAST_SEQUENCES: Final = 8

_BURN_IN: Final = 16
"""Discarded first tokens of a model without a known start token, which begins with a random one."""

N_IMAGES: Final = 128
_IMAGE_SIZE: Final = 64
"""Number of images, and their width if the configuration has none."""

_IGNORED: Final = (
    *("auto_map", "quantization_config", "_attn_implementation", "attn_implementation"),
    *("dtype", "torch_dtype"),
)
"""Ignored configuration keys: external code and kernels, and the training's precision."""

_CORRECTION: Final = {"input_ids": 1.25, "pixel_values": 2.0}
"""Restore cost on data relative to that on generated samples, by the model's input, where the ratio is large:
measured on GPT-2 and ResNet (``docs/design.md``)."""

Evaluate = Callable[[dict[str, Any]], dict[str, Any]]


def prepare(run: Run) -> Prepared:
    """Return the evaluator's data for the checkpoints of a run, from its last checkpoint.

    Raises
    ------
    InputError
        The run has no ``config.json``, or `transformers` lacks the model, or the model's inputs are unknown.
    MissingExtraError
        `transformers` is not installed.
    """
    last = run.steps[-1]
    name, config = model_of(run.path_of(last), run.directory)

    def write(folder: Path) -> None:
        plain = {key: value for key, value in config.items() if key not in _IGNORED}
        (folder / _CONFIG).write_text(json.dumps({**plain, "architectures": [name]}))
        write_state(run[last].state_dict(), folder / _STATE)

    return Prepared(f"{run.identity(last)} {name}", write)


def model_of(last: Path, directory: Path) -> tuple[str, dict[str, Any]]:
    """Return the class and the configuration of a run's model from the files of its last checkpoint.

    Raises
    ------
    InputError, MissingExtraError
        As in `prepare`.
    """
    from inshrink_core.formats.disk import Access, parse_json

    folders = (last if last.is_dir() else last.parent, directory)
    there = [folder / _CONFIG for folder in folders if (folder / _CONFIG).is_file()]
    path = next((file for file in there if not file.is_symlink()), None)
    if path is None:
        raise InputError(
            "there is no config.json to make a model of transformers from",
            where=str(folders[0]),
            remedy="give an evaluator of your own: --evaluator FILE.py:FUNCTION"
            " (inshrink evaluate --write begins one)",
        )
    try:
        read = parse_json(Access.of(path.parent).read_text(path, _MAX_CONFIG_BYTES), str(path))
    except InshrinkError as error:
        raise InputError(f"it cannot be read ({error})", where=str(path)) from error
    config: dict[str, Any] = read if isinstance(read, dict) else {}
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str) and names[0].isidentifier()):
        raise InputError(
            "it names no model of transformers",
            where=str(path),
            expected='"architectures": ["GPT2LMHeadModel"]',
            found=clipped(json.dumps(names)),
        )
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "hf")
    return names[0], config


def likely_evaluator(beside: Path, last: Path, directory: Path) -> str:
    """Return the evaluator that a run without a named one offers; read headers and execute nothing.

    Parameters
    ----------
    beside
        Path of a possible evaluator file.
    last, directory
        As in `model_of`.

    Returns
    -------
    str
        `beside` if that file exists, `AUTO` if a model can be built, otherwise an empty string.
    """
    if beside.is_file():
        return str(beside)
    try:
        model_of(last, directory)
    except InshrinkError:
        return ""
    return AUTO


def evaluator_of(folder: Path) -> Evaluate:
    """Return the evaluator prepared in a folder; runs in the child process.

    Raises
    ------
    ValueError
        `transformers` lacks the model, the checkpoint has another model, the model's inputs are unknown, or
        it predicts no classes.
    """
    import torch

    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    state = torch.load(folder / _STATE, map_location="cpu", weights_only=True, mmap=True)
    load = _loader(json.loads((folder / _CONFIG).read_text()), state)
    model = load(state)
    torch.manual_seed(0)
    with torch.inference_mode():
        samples = _samples(model)
        rows = _log_probs(model, samples)
        labels = _next_tokens(samples, rows)
        if labels is None:
            labels = torch.multinomial(rows.exp(), 1).squeeze(1)

    def evaluate(state: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            rows = _log_probs(load(state), samples)
            loss = torch.nn.functional.nll_loss(rows, labels)
            return {"loss": loss, "log_probs": rows, "correction": _CORRECTION[model.main_input_name]}

    return evaluate


def _loader(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Any]:
    """Return a function that builds a model from a state; refuse a model larger than the checkpoint."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = config["architectures"][0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(  # noqa: TRY004 - it is a file that says so
            f"transformers {transformers.__version__} has no model {name}"
        )
    made: Any = found
    for key, value in config.items():
        if "layer" in key and isinstance(value, int) and value > len(state):
            raise ValueError(f"config.json says {key} = {value}, but the checkpoint has {len(state)} tensors")
    described = made.config_class.from_dict(dict(config))
    with torch.device("meta"):
        planned = sum(value.numel() for value in made._from_config(described).parameters())
    there = sum(value.numel() for value in state.values())
    if planned > 2 * there:
        raise ValueError(f"config.json describes {planned} parameters, but the checkpoint has {there}")

    def load(state: Mapping[str, Tensor]) -> Any:
        # As from a saved folder: `from_pretrained` maps names of earlier versions and ties weights.
        model, about = made.from_pretrained(
            None, config=described, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
        )
        if lost := sorted(about["missing_keys"]):
            raise ValueError(f"the checkpoint has no '{lost[0]}' ({len(lost)} are missing)")
        return model.eval()

    return load


def _samples(model: Any) -> dict[str, Tensor]:
    """Return the evaluated inputs by argument name."""
    import torch

    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        return {main: _images(model)}
    if main != "input_ids":
        raise ValueError(f"its inputs, '{main}', are not supported: only tokens and images are")
    vocabulary = int(config.get_text_config().vocab_size)
    positions = getattr(config, "max_position_embeddings", None) or LENGTH + _BURN_IN
    length = min(LENGTH, int(positions))
    n = min(N_SEQUENCES, max(_LEAST_SEQUENCES, _MAX_LOG_PROBS // (vocabulary * length)))
    tokens = torch.randint(vocabulary, (n, length))
    if config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None) or 0
        written = _written(model, torch.full((n, 1), start), length - 1, {"input_ids": tokens})
        return {"input_ids": tokens, "decoder_input_ids": written}
    if not model.can_generate():
        return {"input_ids": tokens}
    first = getattr(config, "bos_token_id", None)
    if isinstance(first, int) and 0 <= first < vocabulary:
        return {"input_ids": _written(model, torch.full((n, 1), first), length - 1, {})}
    burn_in = min(_BURN_IN, max(0, int(positions) - length))
    return {"input_ids": _written(model, tokens[:, :1], length - 1 + burn_in, {})[:, burn_in:]}


def _written(model: Any, tokens: Tensor, n: int, given: Mapping[str, Tensor]) -> Tensor:
    """Extend token sequences with samples from the model's predictions."""
    import torch

    name = "decoder_input_ids" if given else "input_ids"
    for _ in range(n):
        logits = model(**{**given, name: tokens}, use_cache=False).logits[:, -1].float()
        drawn = torch.multinomial(torch.softmax(logits, -1), 1)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens


def _images(model: Any) -> Tensor:
    """Return noise as smooth as photographs, with the variance that the first normalisation has seen."""
    import torch

    config = model.config
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    # Amplitudes of photographs fall with the inverse of the frequency (Field 1987).
    across, down = torch.fft.rfftfreq(width), torch.fft.fftfreq(height)
    falling = 1 / torch.hypot(down[:, None], across[None]).clamp(min=1 / max(height, width))
    noise = torch.randn(N_IMAGES, int(getattr(config, "num_channels", 3)), height, width)
    images = torch.fft.irfft2(torch.fft.rfft2(noise) * falling, s=(height, width))
    images = images / images.std()
    scale = 1.0
    holding = [module for module in model.modules() if getattr(module, "running_var", None) is not None]

    def look(module: Any, given: tuple[Tensor, ...]) -> None:
        nonlocal scale
        seen = given[0].var((0, 2, 3)).mean()
        scale = float((module.running_var.mean() / seen.clamp(min=1e-12)).sqrt())

    if holding:
        hook = holding[0].register_forward_pre_hook(look)
        model(pixel_values=images)
        hook.remove()
    scaled: Tensor = images * scale
    return scaled


def _log_probs(model: Any, samples: Mapping[str, Tensor]) -> Tensor:
    """Return the model's predictions for its samples, one row each."""
    import torch

    logits = getattr(model(**samples), "logits", None)
    if logits is None or logits.dim() < 2 or logits.shape[1 if logits.dim() == 4 else -1] < 2:
        raise ValueError(
            f"{type(model).__name__} predicts no classes, and only classes can be evaluated without data"
        )
    if logits.dim() == 4:  # a class per pixel: (n, classes, height, width)
        logits = logits.movedim(1, -1)
    elif "pixel_values" not in samples and model.can_generate():
        logits = logits[:, :-1]  # the token after the last one is unknown
    rows = logits.flatten(0, -2)[: _MAX_LOG_PROBS // logits.shape[-1]]
    return torch.log_softmax(rows.float(), -1)


def _next_tokens(samples: Mapping[str, Tensor], rows: Tensor) -> Tensor | None:
    """Return the token that follows each position of a language model's samples; None for other models."""
    written = samples.get("decoder_input_ids", samples.get("input_ids"))
    if written is None or written.shape[0] * (written.shape[1] - 1) < len(rows):
        return None
    return written[:, 1:].flatten()[: len(rows)]
