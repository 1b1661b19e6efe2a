"""Files of a run that hold tensors, and what becomes of each."""

import zipfile
from pathlib import Path

_SHARDS = (".safetensors", ".distcp", ".pkl")


def _holds_tensors(path):
    if path.suffix in _SHARDS:
        # accelerate calls the states of random-number generators .pkl, and writes them as torch files.
        return not path.name.startswith("random_states")
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as held:
        return path.suffix == ".zip" or any("/data/" in name for name in held.namelist())


def tensor_files(folder):
    """Return the files below a folder that hold tensors, without links, relative to it."""
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and _holds_tensors(path)
    ]


def fates_of(run, path):
    """Return what is recorded of a file: of itself, else of the folder that it is a part of."""
    above = [path, *(parent.as_posix() for parent in Path(path).parents)]
    recorded = ([fate for fate in run.fates if fate.path == name] for name in above)
    return next(filter(None, recorded), [])
