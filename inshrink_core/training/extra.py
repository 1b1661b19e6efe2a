"""Values that a training saves beside its models and optimizers, as any reader can read them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from inshrink_core.errors import InputError

_MAX_DEPTH: Final = 32
"""Of containers; deeper ones are a mistake or refer to themselves."""

_MAX_NBYTES: Final = 128 << 20
"""Of numbers and strings in a pickle; half of the limit for reading."""

_MAX_BITS: Final = 2039
"""Of an integer that ``torch.load`` reads with ``weights_only``."""

_VALUE_NBYTES: Final = 9
_TENSOR_NBYTES: Final = 200
"""Size of a value, and of the description of a tensor, in a pickle."""

_ARRAY, _SCALAR, _BYTES = "array", "scalar", "bytes"


def pack(extra: Mapping[str, Any] | None, is_shared: Callable[[Tensor], bool]) -> tuple[Any, dict[str, Any]]:
    """Return values for a plain torch file, and what `unpack` needs to invert the conversion.

    Parameters
    ----------
    extra
        By name.
    is_shared
        Whether a tensor shares its memory with another saved tensor; such tensors are copied.

    Returns
    -------
    values
        The same containers, with tensors instead of NumPy arrays and numbers.
    kinds
        The types of these values, by the positions of their tensors.

    Raises
    ------
    InputError
        A value could not be read back.
    """
    kinds: dict[str, list[int]] = {}
    made: dict[int, Any] = {}
    n_tensors = 0

    def packed(value: Any) -> Any:
        nonlocal n_tensors
        kind = ""
        if type(value) is np.ndarray or isinstance(value, np.generic):
            kind = _ARRAY if type(value) is np.ndarray else _SCALAR
            try:
                tensor = torch.from_numpy(np.array(value, order="C"))
            except (TypeError, ValueError):  # texts, dates, objects, big-endian numbers
                return value
        elif type(value) is bytes and not value:
            kind, tensor = _BYTES, torch.empty(0, dtype=torch.uint8)
        elif isinstance(value, torch.Tensor):
            tensor = _alone(value, is_shared)
        else:
            return value
        if kind:
            kinds.setdefault(kind, []).append(n_tensors)
        n_tensors += 1
        # Shared objects stay shared.
        return made.setdefault(id(value), tensor)

    extra = dict(extra or {})
    values = _mapped(extra, packed, {})
    for key, value in values.items():
        if not isinstance(key, str):
            raise InputError(f"extra cannot have the key {key!r}", remedy="choose a name for it")
        require_plain(value, f"extra[{key!r}]")
    return values, dict(kinds)


def unpack(values: Any, kinds: Mapping[str, Any]) -> Any:
    """Return the values given to `pack`."""
    listed = {kind: numbers for kind, numbers in kinds.items() if isinstance(numbers, list)}
    kind_of = {number: kind for kind, numbers in listed.items() for number in numbers}
    n_tensors = 0

    def unpacked(value: Any) -> Any:
        nonlocal n_tensors
        if not isinstance(value, torch.Tensor):
            return value
        n_tensors += 1
        kind = kind_of.get(n_tensors - 1)
        if kind is None:
            return value
        return b"" if kind == _BYTES else value.numpy() if kind == _ARRAY else value.numpy()[()]

    return _mapped(values, unpacked, {}) if kind_of else values


def _mapped(value: Any, leaf: Callable[[Any], Any], made: dict[int, Any], depth: int = 0) -> Any:
    """Return equal containers with other leaves; shared containers stay shared."""
    if id(value) in made:
        return made[id(value)]
    if depth > _MAX_DEPTH:
        return value
    if type(value) in (dict, OrderedDict, Counter):
        like = made[id(value)] = copy.copy(value)  # with its attributes: a state dict has `_metadata`
        for key, item in value.items():
            like[key] = _mapped(item, leaf, made, depth + 1)
        return like
    if type(value) is list:
        items = made[id(value)] = []
        items += [_mapped(item, leaf, made, depth + 1) for item in value]
        return items
    if type(value) is tuple:
        found = tuple(_mapped(item, leaf, made, depth + 1) for item in value)
        return made.setdefault(id(value), found) if found else found
    return leaf(value)


def _alone(value: Tensor, is_shared: Callable[[Tensor], bool]) -> Tensor:
    """Return the values of a tensor or parameter, copied if its memory is shared."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    return value.detach().clone() if is_shared(value) else value.detach()


def require_plain(value: Any, where: str) -> None:
    """Check that `torch.load` with ``weights_only``, and this project's readers, can read a value.

    Raises
    ------
    InputError
        They cannot, or the value is too large; `where` names it.
    """
    done: set[int] = set()
    above: set[int] = set()
    room = _MAX_NBYTES

    def visit(value: Any, is_key: bool = False) -> None:
        nonlocal room
        room -= _VALUE_NBYTES
        if isinstance(value, (str, bytes)):
            room -= len(value)
        if room < 0:
            raise InputError(
                f"{where} holds more than {_MAX_NBYTES >> 20} MB of numbers and texts",
                remedy="put them into tensors, or into arrays of NumPy",
            )
        if _is_plain(value):
            return
        if not is_key and _is_readable_tensor(value):
            room -= _TENSOR_NBYTES
            return
        kind = type(value)
        mapping = kind in (dict, OrderedDict, Counter) and not is_key
        if not (mapping or kind is tuple or (kind in (list, set) and not is_key)):
            raise _refused(value, where)
        if id(value) in done:
            return
        if id(value) in above or len(above) >= _MAX_DEPTH:
            raise _refused(value, where)
        above.add(id(value))
        if mapping:
            for attribute in vars(value).values() if kind is not dict else ():
                visit(attribute)
            for key, item in value.items():
                visit(key, is_key=True)
                visit(item)
        else:
            for item in value:
                visit(item, is_key=is_key or kind is set)
        above.remove(id(value))
        done.add(id(value))

    visit(value)


def _is_plain(value: Any) -> bool:
    """Tell whether a value without others inside can be read back."""
    if type(value) is int:
        return value.bit_length() <= _MAX_BITS
    if type(value) is bytes:
        return value != b""  # pickled as a call that torch refuses
    plain = (bool, float, complex, str, torch.Size)
    return value is None or type(value) in plain or isinstance(value, (torch.dtype, torch.device))


def _is_readable_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor that can be read back."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    known: Container[Any] = (torch.Tensor, torch.nn.Parameter, *torch.serialization.get_safe_globals())
    return type(value) in known


def _refused(value: Any, where: str) -> InputError:
    return InputError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}",
        expected="numbers, texts, tensors, and lists and dicts of them",
        found=repr(value)[:80],
        remedy="save its state_dict, or turn it into such values",
    )
