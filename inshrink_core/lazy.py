"""Lazy loading of a package's public names on first use (PEP 562)."""

from __future__ import annotations

import ast
import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def index(package: str, *, with_verbs: bool = False) -> list[str]:
    """Let the names that a package imports under ``if TYPE_CHECKING:`` load on first use.

    Parameters
    ----------
    package
        Name of the package, which calls this function during its import.
    with_verbs
        Whether registered verbs are attributes of the package, too.

    Returns
    -------
    list of str
        The names, for ``__all__``.

    Notes
    -----
    A public name hides a submodule of the same name: ``from PACKAGE.MODULE import NAME`` reaches the
    submodule, ``import PACKAGE.MODULE as module`` does not.
    """
    module = sys.modules[package]
    where = {
        alias.asname or alias.name: (node.module, alias.name)
        for block in ast.parse(pkgutil.get_data(package, "__init__.py") or b"").body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module.__dict__["_where"] = where
    module.__dict__["_with_verbs"] = with_verbs
    module.__class__ = _Index
    return sorted(where)


class _Index(ModuleType):
    """A package whose names load on first use."""

    _where: dict[str, tuple[str, str]]
    _with_verbs: bool

    def __getattr__(self, name: str) -> Any:
        source, attribute = self._where.get(name, ("", name))
        value: Any = None
        if not source and self._with_verbs and not name.startswith("_"):
            from inshrink_core.request import python_call, request_of

            request = request_of(name.replace("_", "-"))
            value = None if request is None else python_call(request)
        elif source == self.__name__:
            value = import_module(f"{source}.{attribute}")
        elif source:
            value = getattr(import_module(source), attribute)
        if value is None:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule must not replace the public name that hides it.
        is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if is_submodule and self._where.get(name, (self.__name__, ""))[0] != self.__name__:
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # cloudpickle recognizes only plain modules, and would pickle the content of a subclass.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted(self._where)
