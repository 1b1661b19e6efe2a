"""DeepSpeed checkpoints: folders written by its engine, reassembled by parameter.

With ZeRO each rank stores a partition of every parameter group. The partition is one flat vector with the
masters or moments of many parameters in sequence, and a parameter may continue in the file of the next rank.
The shapes in the model's file give the start of each parameter. A slice of a vector is a run of elements,
which is a few boxes of the tensor. The tensor therefore has pieces, like a tensor in any sharded layout.
Layout: deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py, runtime/bf16_optimizer.py
and utils/zero_to_fp32.py of DeepSpeed 0.19.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from inshrink_core.checkpoint import DTYPE_SIZES, Box
from inshrink_core.errors import DamagedError, clipped
from inshrink_core.formats.checkpoints import Contents, FilesReader, read_weight_files
from inshrink_core.formats.content import FileContent, TorchFile
from inshrink_core.formats.discovery import TRAINER_STATE
from inshrink_core.formats.disk import Access, ReadableFile, is_dir, is_file, missing, scan
from inshrink_core.formats.distributed import Sizes
from inshrink_core.formats.names import is_numbered
from inshrink_core.formats.state_tree import Placed, StateTree, read_state_tree, strip_wrappers
from inshrink_core.formats.torch.pickles import StorageRef, TensorRef, mapping

_FILE: Final = re.compile(
    r"^(?:(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_?(model|optim)_states\.pt$"
)
_LAYER: Final = re.compile(r"^layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt$")
"""File of a pipeline: the weights of one layer, or one rank's share of them."""

_LATEST: Final = "latest"
"""The file beside the folders that names the newest one."""

_STAGE_3, _STAGES_1_AND_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"
_BASE: Final = {_STAGE_3: "optimizer_state_dict", _STAGES_1_AND_2: "base_optimizer_state"}
"""In a rank's file, the key of the masters, mapped to the key of PyTorch's optimizer."""

_MASTER: Final = "master_param"
_FRAGMENTS: Final = "frozen_param_fragments"


class DeepSpeedReader(FilesReader):
    """Reads the folder of one tag (``global_step100/``), or a directory with one such folder as its part.

    Hugging Face's trainer, accelerate and Lightning write such directories. Optimizer state and masters are
    named after their parameters, independent of their rank. Other files are carried unread.
    """

    name: ClassVar[str] = "deepspeed"

    def detect(self, path: Path, access: Access) -> bool:
        """Return whether the names in a directory match, or those in a subfolder if `latest` is present."""
        return is_dir(path) and _tag_folder(path) is not None

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of the files of all ranks, and of weights beside them."""
        folder = _tag_folder(path) or path
        prefix = "" if folder == path else f"{folder.name}/"
        names = _rank_files(name.removeprefix(prefix) for name in paths if name.startswith(prefix))
        beside = [name for name in paths if not _rank_files([name.removeprefix(prefix)])]
        contents = read_weight_files(path, {name: paths[name] for name in beside}, access).files
        known = frozenset(name for item in contents.values() for name, _ in item.tree.model)
        first = len(contents)
        files = {name: _File(folder / name, access, first + i) for i, name in enumerate(names)}
        contents |= {prefix + name: content for name, content in _joined(folder, files, known).items()}
        return Contents(contents, self.name)


def _tag_folder(path: Path) -> Path | None:
    """Return the folder with the rank files: `path` itself, or the only such folder in it that is part of it.

    A folder with a step in its name is a separate checkpoint, unless the trainer's state is beside it.
    """
    entries = scan(path)
    if any(_FILE.match(entry.name) for entry in entries):
        return path
    if not any(entry.name == _LATEST for entry in entries):
        return None
    folders = [Path(entry.path) for entry in entries if is_dir(entry)]
    inner = [folder for folder in folders if any(_FILE.match(entry.name) for entry in scan(folder))]
    if len(inner) != 1:
        return None
    return inner[0] if not is_numbered(inner[0].name) or is_file(path / TRAINER_STATE) else None


def _rank_files(names: Iterable[str]) -> list[str]:
    """Return the names of files that are read; of two names for the same rank, the latter."""
    remaining: dict[tuple[str | None, ...], str] = {}
    for name in names:
        if of := _FILE.match(name):
            remaining[of[1] or "0", of[2], of[3]] = name
        elif of := _LAYER.match(name):
            remaining["layer", of[1], of[2]] = name
    return list(remaining.values())


class _File:
    """A file with its number in the checkpoint, its unpickled description and the places of its tensors."""

    def __init__(self, path: Path, access: Access, number: int) -> None:
        self.path, self.number = path, number
        stamp = access.admit(path)
        with ReadableFile(path, access.counter, stamp) as file:
            opened = TorchFile.read(file, allow_damaged=access.allow_damaged)
        self.root, self.place, self.n_bytes = mapping(opened.root), opened.place, opened.n_bytes
        entries = tuple(sorted(opened.storages.values()))
        self.content = FileContent(stamp, "torch", StateTree(), entries=entries)

    def vector(self, value: object) -> Placed | None:
        """Return the place of a flat tensor; None for anything else."""
        placed = self.place(value) if isinstance(value, TensorRef) and len(value.shape) == 1 else None
        return placed if placed is not None and placed.stride is None else None

    def require_few(self, n_values: int) -> None:
        """Refuse more values than the pickle has bytes, which repeated references could produce."""
        if n_values > self.n_bytes:
            raise self.damaged("the file holds more values than a checkpoint would")

    def damaged(self, what: str) -> DamagedError:
        return DamagedError(what, where=str(self.path), remedy="fetch the files of all ranks again")


def _joined(folder: Path, files: Mapping[str, _File], known: frozenset[str]) -> dict[str, FileContent]:
    """Return the content of each file; the first model file of a model-parallel rank lists its tensors.

    Parameters
    ----------
    folder
        The folder of the tag.
    files
        Its files by name.
    known
        Names of weights in files beside the folder.
    """
    found = {name: file.content for name, file in files.items()}
    called: set[str] = set()
    by_rank: dict[int, dict[str, dict[int, _File]]] = {}
    for name, file in files.items():
        if of := _FILE.match(name):
            kinds = by_rank.setdefault(int(of[2]), {"model": {}, "optim": {}})
            kinds[of[3]][int(of[1] or 0)] = file
        elif of := _LAYER.match(name):
            tree = read_state_tree(file.root, file.place, str(file.path), n_bytes=file.n_bytes)
            tree = tree._replace(model=[(f"{int(of[1])}.{key}", placed) for key, placed in tree.model])
            found[name] = file.content._replace(tree=_apart(tree, f"model_{of[2] or 0}.", called))
    known, called = known | called, set()
    for mp_rank, kinds in sorted(by_rank.items()):
        models, ranks = (dict(sorted(rows.items())) for rows in kinds.values())
        if 0 not in models:
            raise missing(folder, f"mp_rank_{mp_rank:02d}_model_states.pt")
        model_rank = _ModelRank(list(models.values()), list(ranks.values()))
        for rows in (ranks, models) if model_rank.is_stage_3 else (ranks,):
            _require_ranks(folder, rows, model_rank)
        tree = _apart(model_rank.tree(known), f"mp_rank_{mp_rank:02d}.", called)
        found[models[0].path.name] = models[0].content._replace(tree=tree)
    return found


def _require_ranks(folder: Path, files: Mapping[int, _File], held: _ModelRank) -> None:
    if not files and held.is_partitioned:
        raise missing(folder, "*_optim_states.pt")
    # With many files missing, the first gap is at most one past the number of files present.
    for rank in range(min(held.n_ranks, len(files) + 1)):
        if rank not in files:
            example = files[min(files)].path.name
            raise missing(folder, re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example))


def _apart(tree: StateTree, prefix: str, called: set[str]) -> StateTree:
    """Return a tree with unique names: model-parallel ranks use the same names for their shares."""
    names = {name for name, _ in tree.model}
    names |= {str(name) for optimizer in tree.optimizers for name in optimizer.state}
    taken = names & called
    called |= names
    if not taken:
        return tree
    apart = tree.prefixed(prefix)
    new = tree.renamed(lambda name: prefix + name if name in taken else name)
    return new._replace(extra=apart.extra, models=apart.models)


class _Run(NamedTuple):
    """A run of a parameter's elements in row-major order, and its place in a rank's group vector."""

    start: int
    stop: int
    rank: int
    group: int
    at: int


class _Parameter(NamedTuple):
    """A parameter stored in vectors, with its runs."""

    name: str
    shape: tuple[int, ...]
    runs: list[_Run]


def _runs(vectors: Iterable[tuple[int, int, int]], at: int, start: int, stop: int) -> list[_Run]:
    """Return the runs of the elements from `start` to `stop`, which are at `at` in consecutive vectors.

    Each vector is given by its rank, its group and its size.
    """
    found = []
    end = at + stop - start
    for rank, group, size in vectors:
        first, last = max(at, 0), min(end, size)
        if first < last:
            found.append(_Run(start + first - at, start + last - at, rank, group, first))
        at, end = at - size, end - size
    return found


_Vectors = list[dict[int, Placed]]
"""For each rank, the group vectors by group number."""


class _ModelRank:
    """The files of one model-parallel rank: those of the model, and the optimizer files of all data ranks."""

    def __init__(self, models: list[_File], ranks: list[_File]) -> None:
        self.models, self.ranks = models, ranks
        self._states = [mapping(file.root.get("optimizer_state_dict")) for file in ranks]
        self.is_stage_3 = bool(ranks) and _STAGE_3 in self._states[0]
        """Whether each parameter is partitioned separately; stages 1 and 2 partition the group vector."""
        self.is_partitioned = isinstance(models[0].root.get("param_shapes"), list)
        count = self._states[0].get("partition_count") if ranks else None
        counts = [item for item in (count if isinstance(count, list) else [count]) if type(item) is int]
        self.n_ranks = max([1, *counts])
        self._is_cut = self.is_partitioned and len(set(counts)) == 1
        """False for experts, which have as many partitions as copies; their files are carried unread."""

    def tree(self, known: frozenset[str]) -> StateTree:
        """Return the tensors of all files, with names and roles as in a torch file of the same content.

        Model tensors are renamed ``deepspeed.NAME`` if `known` contains their names, because files beside the
        folder hold the same weights.
        """
        file = self.models[0]
        root, module = dict(file.root), dict(mapping(file.root.get("module")))
        called = dict(zip(module, strip_wrappers(list(map(str, module))), strict=True))
        places: dict[TensorRef, Placed] = {}

        def ref(placed: Placed) -> TensorRef:
            made = TensorRef(StorageRef("", placed.dtype, 0), placed.dtype, 0, placed.shape, ())
            places[made] = placed
            return made

        vectors = self._vectors() if self._is_cut else {}
        parameters = self._cut(vectors[_MASTER]) if _MASTER in vectors else []
        frozen, fragments = self._frozen() if self.is_stage_3 else ([], [])
        places_of = ((item.name, _placed(item, fragments, self.models, required=True)) for item in frozen)
        weights = {name: ref(placed) for name, placed in places_of if placed is not None}
        state: dict[str, dict[str, TensorRef]] = {}
        for parameter in parameters:
            rows = ((k, _placed(parameter, v, self.ranks, required=k == _MASTER)) for k, v in vectors.items())
            state[parameter.name] = {key: ref(placed) for key, placed in rows if placed is not None}
            there = module.get(parameter.name)
            is_there = isinstance(there, TensorRef) and math.prod(there.shape) > 0
            if self.is_stage_3 and not is_there and called.get(parameter.name, parameter.name) not in known:
                weights[parameter.name] = state[parameter.name].pop(_MASTER)
        shared = mapping(root.get("shared_params"))
        for name in [*module, *weights]:
            if (given := weights.get(name) or weights.get(shared.get(name, ""))) is not None:
                module[name] = given
        apart = {name: value for name, value in module.items() if called.get(name, name) in known}
        root["module"] = {name: value for name, value in module.items() if name not in apart}
        root["deepspeed"] = apart
        if self.is_stage_3:
            root.pop(_FRAGMENTS, None)
        if self._is_cut:
            root["optimizer"] = {"state": state, "param_groups": self._groups(parameters)}
        root["global_step"] = root.get("global_steps", root.get("global_step"))
        n_bytes = sum(item.n_bytes for item in (*self.models, *self.ranks))
        tree = read_state_tree(
            root, lambda item: places.get(item) or file.place(item), str(file.path), n_bytes=8 * n_bytes
        )
        if isinstance(names := root.get("buffer_names"), list):
            buffer_names = {called[name] for name in names if isinstance(name, str) and name in called}
            tree = tree._replace(buffers=frozenset(buffer_names))
        return tree

    def _vectors(self) -> dict[str, _Vectors]:
        """Return masters and the state of PyTorch's optimizer, by their names in it."""
        found: dict[str, _Vectors] = {}
        key = _STAGE_3 if self.is_stage_3 else _STAGES_1_AND_2
        for rank, (file, state_of_rank) in enumerate(zip(self.ranks, self._states, strict=True)):
            masters, base = state_of_rank.get(key), state_of_rank.get(_BASE[key])
            if not isinstance(masters, list):
                return {}
            # An elastic checkpoint has a list instead of the optimizer's state.
            state = dict(enumerate(base)) if isinstance(base, list) else mapping(mapping(base).get("state"))
            file.require_few(sum(len(mapping(state_of_vector)) for state_of_vector in state.values()))
            rows = [(i, _MASTER, value) for i, value in enumerate(masters)]
            for i, state_of_vector in state.items():
                named = mapping(state_of_vector).items() if type(i) is int else ()
                rows += [(i, k, value) for k, value in named if isinstance(k, str) and k != _MASTER]
            for i, name, value in rows:
                if (placed := file.vector(value)) is not None:
                    found.setdefault(name, [{} for _ in self.ranks])[rank][i] = placed
        return found

    def _shapes(self, value: object) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter, from a table in the model's file."""
        try:
            return msgspec.convert(value, dict[str, Sizes])
        except msgspec.ValidationError as error:
            raise self.models[0].damaged(f"no shape of a parameter: {error}") from error

    def _cut(self, masters: _Vectors) -> list[_Parameter]:
        """Return the parameters with their runs in the vectors.

        Raises
        ------
        DamagedError
            The vectors hold fewer elements than the shapes in the model's file require.
        """
        groups = [self._shapes(group) for group in self.models[0].root["param_shapes"]]
        shapes = {name: shape for group in groups for name, shape in group.items()}
        if len(shapes) != sum(map(len, groups)):
            raise self.models[0].damaged("a parameter has two shapes")
        if self.is_stage_3:
            return self._cut_each(shapes, [masters[0][i].shape[0] for i in sorted(masters[0])])
        found = []
        paddings = self._states[0].get("param_alignment_paddings")
        for number, group in enumerate(groups):
            part = masters[0][number].shape[0] if number in masters[0] else 0
            padding = paddings[number] if isinstance(paddings, list) and number < len(paddings) else ()
            at = 0
            for i, (name, shape) in enumerate(group.items()):
                if numel := math.prod(shape):
                    if not part or at + numel > part * len(self.ranks):
                        raise self._too_short(name)
                    held_by = range(at // part, (at + numel - 1) // part + 1)
                    vectors = ((rank, number, part) for rank in held_by)
                    found.append(_Parameter(name, shape, _runs(vectors, at % part, 0, numel)))
                extra = padding[i] if isinstance(padding, list) and i < len(padding) else 0
                at += numel + (extra if type(extra) is int and extra > 0 else 0)
        return found

    def _cut_each(self, shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[int]) -> list[_Parameter]:
        """Return parameters cut into equal parts, one per rank; the parts of a rank are contiguous."""
        found: list[_Parameter] = []
        at = 0
        for name, shape in shapes.items():
            if not (numel := math.prod(shape)):
                continue
            part = -(-numel // len(self.ranks))
            if at + part > sum(sizes):
                raise self._too_short(name)
            runs: list[_Run] = []
            for rank in range(-(-numel // part)):
                vectors = ((rank, group, size) for group, size in enumerate(sizes))
                runs += _runs(vectors, at, rank * part, min(numel, (rank + 1) * part))
            found.append(_Parameter(name, shape, runs))
            at += part
        return found

    def _too_short(self, name: str) -> DamagedError:
        return self.ranks[0].damaged(f"the partitions end before '{clipped(name)}', which the model has")

    def _frozen(self) -> tuple[list[_Parameter], _Vectors]:
        """Return the frozen parameters of stage 3 and the places of their parts."""
        found: list[_Parameter] = []
        fragments: _Vectors = [{} for _ in self.models]
        shapes = self._shapes(self.models[0].root.get("frozen_param_shapes") or {})
        for i, (name, shape) in enumerate(shapes.items()):
            for rank, file in enumerate(self.models):
                if (placed := file.vector(mapping(file.root.get(_FRAGMENTS)).get(name))) is not None:
                    fragments[rank][i] = placed
            parts = self._cut_each({name: shape}, [-(-math.prod(shape) // len(self.ranks))])
            found += [part._replace(runs=[run._replace(group=i) for run in part.runs]) for part in parts]
        return found, fragments

    def _groups(self, parameters: Sequence[_Parameter]) -> list[dict[Any, Any]]:
        """Return the optimizer's groups with parameter names instead of vectors."""
        base = mapping(self._states[0].get(_BASE[_STAGE_3 if self.is_stage_3 else _STAGES_1_AND_2]))
        given = base.get("param_groups")
        groups: list[Any] = given if isinstance(given, list) else []
        owner: dict[int, int] = {}
        n_values = 0
        for number, group in enumerate(groups):
            params = mapping(group).get("params")
            if isinstance(params, list):
                self.ranks[0].require_few(n_values := n_values + len(params))
                owner |= {param: number for param in params if type(param) is int}
        names: dict[int, list[str]] = {}
        for parameter in parameters:
            if parameter.runs[0].group in owner:
                names.setdefault(owner[parameter.runs[0].group], []).append(parameter.name)
        return [
            {key: value for key, value in groups[number].items() if key != "param_names"} | {"params": items}
            for number, items in names.items()
        ]


def _placed(
    parameter: _Parameter, vectors: _Vectors, files: Sequence[_File], *, required: bool
) -> Placed | None:
    """Return the place of a parameter in vectors; None if ranks lack it or have another size.

    Raises
    ------
    DamagedError
        A required part of a rank is missing or too short, or a part has another dtype.
    """
    parts: list[tuple[Box, int, Placed]] = []
    dtype = ""
    for run in parameter.runs:
        if run.rank >= len(files):
            return None
        file, vector = files[run.rank], vectors[run.rank].get(run.group)
        if vector is None or run.at + run.stop - run.start > vector.shape[0]:
            if required:
                raise file.damaged(f"rank {run.rank} has not all of its part of '{clipped(parameter.name)}'")
            return None
        dtype = dtype or vector.dtype
        if vector.dtype != dtype:
            what = f"rank {run.rank} has '{clipped(parameter.name)}' as {vector.dtype}, not as {dtype}"
            raise file.damaged(what)
        itemsize = DTYPE_SIZES[dtype]
        offset = vector.offset + run.at * itemsize
        # Boxes are cached: masters, moments and all steps share them.
        for box in _boxes(run.start, run.stop, parameter.shape):
            nbytes = math.prod(box.sizes) * itemsize
            parts.append((box, file.number, Placed(dtype, box.sizes, None, offset, nbytes)))
            offset += nbytes
    return Placed.joined(dtype, parameter.shape, parts)


@functools.lru_cache(maxsize=1 << 16)
def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the boxes that cover a range of elements in row-major order, in order.

    Examples
    --------
    >>> for box in _boxes(3, 10, (3, 4)):
    ...     print(box.offsets, box.sizes)
    (0, 3) (1, 1)
    (1, 0) (1, 4)
    (2, 0) (1, 2)
    """
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    inner = shape[1:]
    row = math.prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)

    def within(index: int, begun: int, end: int) -> list[Box]:
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in _boxes(begun, end, inner)]

    if first == last:
        return tuple(within(first, head, tail))
    found = within(first, head, row) if head else []
    first += bool(head)
    if first < last:
        found.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return (*found, *within(last, 0, tail))
