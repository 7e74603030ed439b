"""Attributes of other people's modules and classes, replaced for a while and put back."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from moe_telemetry.store import logger

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class _Patch:
    owner: ModuleType | type
    name: str
    original: Function
    replacement: Function
    inherited: bool

    @property
    def of_class(self) -> bool:
        return isinstance(self.owner, type)


class Patches:
    """What is replaced now. `restore` puts the very originals back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches: list[_Patch] = []
        self._over = False  # a generation of before may bind another model yet

    def replace(self, module: ModuleType | None, path: str, make: Callable[[Function], Function]) -> None:
        """Put `make(original)` in the place of a module's function or of a class' method ("Class.method").

        One that does not exist is told once and left out.
        """
        owner: Any = module
        *kind, name = map(sys.intern, path.split("."))  # since the interpreter's method cache keeps them
        for part in kind:
            owner = getattr(owner, part, None)
        if owner is not None and getattr(owner, name, None) is not None:
            self.replace_in(owner, name, make)
        elif module is not None:
            tell_missing(f"{module.__name__}.{path}")

    def replace_in(self, owner: ModuleType | type, name: str, make: Callable[[Function], Function]) -> None:
        """The same for an attribute that exists. A class that inherits it gets one of its own."""
        with self._lock:
            original: Function = getattr(owner, name)
            if self._over or any(patch.replacement is original for patch in self._patches):
                return
            inherited = isinstance(owner, type) and name not in vars(owner)
            if inherited:
                original = _inherited(owner, name, original)
            replacement = make(original)
            self._patches.append(_Patch(owner, name, original, replacement, inherited))
            setattr(owner, name, replacement)

    def spread(self) -> None:
        """Replace functions in the modules, too, that have imported them by name."""
        with self._lock:
            _redirect({id(patch.original): patch.replacement for patch in self._patches if not patch.of_class})

    def restore(self) -> None:
        """Put everything back for good, the last first. What others have replaced since stays as they left it."""
        with self._lock:
            self._over = True
            _redirect({id(patch.replacement): patch.original for patch in self._patches if not patch.of_class})
            for patch in reversed(self._patches):
                if vars(patch.owner).get(patch.name) is patch.replacement:
                    if patch.inherited:
                        delattr(patch.owner, patch.name)
                    else:
                        setattr(patch.owner, patch.name, patch.original)
            self._patches.clear()


def _inherited(owner: Any, name: str, found: Function) -> Function:
    @wraps(found)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), name)(*args, **kwargs)  # looked up in each call: a base may be replaced

    return call


def _redirect(functions: dict[int, Function]) -> None:
    """Let every loaded module that holds a function, given by its id, hold another; all of them are alive."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and any(id(value) in functions for value in list(names.values())):
            names.update({name: functions[id(value)] for name, value in names.items() if id(value) in functions})


_told: set[str] = set()


def tell_missing(what: str) -> None:
    """Say once that this mlx_lm has no such thing."""
    if what not in _told:
        _told.add(what)
        logger.warning("this mlx_lm has no %s: what would be recorded there is left out", what)


def argument(method: Function, name: str, position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What reads an argument of a method's calls; `position`, behind `self`, holds where it has another name."""
    names = [*inspect.signature(method).parameters][1:]
    at = names.index(name) if name in names else position
    own = names[at] if at < len(names) else name

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[at] if len(args) > at else kwargs[own if own in kwargs else name]

    return read
