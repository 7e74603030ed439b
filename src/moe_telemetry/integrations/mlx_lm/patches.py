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


class Patches:
    """What is replaced now. `restore` puts the very originals back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches: list[_Patch] = []

    def replace(self, owner: ModuleType | type | None, name: str, make: Callable[[Function], Function]) -> None:
        """Put `make(original)` in the attribute's place; one that does not exist is told once and left out.

        A class that inherits the attribute gets one of its own. A module's function is replaced in the modules that
        have imported it by name, too.
        """
        with self._lock:
            original = getattr(owner, name, None)
            if owner is None or original is None:
                tell_missing(owner, name)
                return
            if self.has(original):
                return
            inherited = isinstance(owner, type) and name not in vars(owner)
            if inherited:
                original = _inherited(owner, name, original)
            replacement = make(original)
            self._patches.append(_Patch(owner, name, original, replacement, inherited))
            setattr(owner, name, replacement)
            if isinstance(owner, ModuleType):
                _redirect(original, replacement)

    def has(self, function: object) -> bool:
        """Whether the function stands in the place of another."""
        return any(patch.replacement is function for patch in self._patches)

    def restore(self) -> None:
        """Put everything back, the last first. What somebody else has replaced since stays as they left it."""
        with self._lock:
            while self._patches:
                patch = self._patches.pop()
                if vars(patch.owner).get(patch.name) is patch.replacement:
                    if patch.inherited:
                        delattr(patch.owner, patch.name)
                    else:
                        setattr(patch.owner, patch.name, patch.original)
                if isinstance(patch.owner, ModuleType):
                    _redirect(patch.replacement, patch.original)


def _inherited(owner: Any, name: str, found: Function) -> Function:
    @wraps(found)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), name)(*args, **kwargs)  # looked up in each call: a base may be replaced

    return call


def _redirect(old: Function, new: Function) -> None:
    """Let every loaded module that holds the one function hold the other."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            for name, value in list(names.items()):
                if value is old:
                    names[name] = new


_told: set[str] = set()


def tell_missing(owner: object, name: str) -> None:
    """Say once that this mlx_lm has no such thing."""
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else getattr(owner, "__name__", "")
    missing = f"{where}.{name}".strip(".")
    if missing not in _told:
        _told.add(missing)
        logger.warning("this mlx_lm has no %s: what would be recorded there is left out", missing)


def argument(method: Function, name: str, position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What reads an argument of a method's calls; `position`, behind `self`, holds where it has another name."""
    names = [*inspect.signature(method).parameters][1:]
    at = names.index(name) if name in names else position

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[at] if len(args) > at else kwargs[name]

    return read
