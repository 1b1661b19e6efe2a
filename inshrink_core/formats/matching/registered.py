"""Find the order in which a model's code registers its parameters, from the library that its config names.

transformers builds the model without memory (PyTorch's meta device), in a separate process with a time limit.
Code of the run is never executed: no ``auto_map``, no remote code, no network access.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inshrink_core.errors import InshrinkError
from inshrink_core.execution.process import minimal_environment, start_python
from inshrink_core.execution.results import ResultStore, user_cache_folder
from inshrink_core.formats.disk import Access, is_file

if TYPE_CHECKING:
    from inshrink_core.formats.assembly import ParsedCheckpoint


_CONFIG: Final = "config.json"
_MAX_SECONDS: Final = 120.0
_VERSION: Final = 2

_BUILD: Final = """
import contextlib, json, sys
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
config = json.load(sys.stdin)
import torch, transformers
known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
kind = getattr(transformers, config["architectures"][0])
if not issubclass(kind, transformers.PreTrainedModel):
    raise SystemExit("no model")
with torch.device("meta"):
    model = kind(known)
json.dump(list(saved_names(model).values()), sys.stdout)
"""


def saved_names(model: Any) -> dict[str, str]:
    """Return the names of a module's parameters in its saved files, by parameter name, in registration order.

    Notes
    -----
    Later versions of transformers save some models under the weight names of earlier versions.
    """
    names = [name for name, _ in model.named_parameters()]
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return dict(zip(names, names, strict=True))
    found = {}
    for name, parameter in model.named_parameters():
        try:
            reverted = list(revert_weight_conversion(model, {name: parameter}))
        except Exception:
            reverted = []
        found[name] = reverted[0] if len(reverted) == 1 else name
    return found


def registered_order(parsed: ParsedCheckpoint, directory: Path, access: Access) -> tuple[str, ...]:
    """Return the names of a checkpoint's weights in registration order; () if it is unknown.

    Parameters
    ----------
    parsed
        The checkpoint.
    directory
        Directory of the run, which may hold one config for all checkpoints.
    access
        Access rights for reading files.

    Notes
    -----
    Takes some seconds the first time; the result is stored in the user's cache by the digest of the config.
    """
    folders = [parsed.path, directory] if parsed.path.is_dir() else [directory]
    return tuple(_names(_config(folders, access)))


def _config(folders: Iterable[Path], access: Access) -> dict[str, Any] | None:
    for folder in folders:
        if is_file(folder / _CONFIG):
            with contextlib.suppress(InshrinkError, OSError):
                found = access.read_json(folder / _CONFIG)
                return found if isinstance(found, dict) else None
    return None


def _names(config: dict[str, Any] | None) -> list[str]:
    """Return the parameters of the model that a config of transformers describes; [] if none can be built."""
    if config is None or not isinstance(config.get("model_type"), str):
        return []
    kinds = config.get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if not isinstance(kind, str) or not kind.isidentifier():
        return []
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return []
    config = {k: v for k, v in config.items() if k not in ("auto_map", "quantization_config")}
    document = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(document.encode()).hexdigest()
    key = {"version": _VERSION, "config": digest, "transformers": version}
    store = ResultStore(user_cache_folder(), "names", partial(msgspec.convert, type=list[str]))
    names = store.load("registered", key)
    if names is None:
        names = _built(document)
        if names is None:
            return []
        store.try_keep("registered", key, names)
    return names


def _built(document: str) -> list[str] | None:
    """Build a model and return its parameter names; [] if the config describes none, None after a timeout."""
    environment = minimal_environment() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    source = inspect.getsource(saved_names).replace("-> dict[str, str]", "").replace(": Any", "")
    script = f"{source}\n{_BUILD}"
    process = start_python(["-c", script], errors=subprocess.DEVNULL, environment=environment)
    try:
        found, _ = process.communicate(document, timeout=_MAX_SECONDS)
        return msgspec.json.decode(found, type=list[str]) if process.returncode == 0 else []
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return None
    finally:
        process.kill()
        process.wait()
