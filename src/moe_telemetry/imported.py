"""Act when a module is imported, or at once where it is: a process that never imports it pays for nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger("moe_telemetry")


def when_imported(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Call `action()` when the top-level module `name` has been imported, in the thread that imports it.

    An Exception that it raises is logged: the import goes on. The function returned calls it off.
    """
    if name in sys.modules:
        _logged(action, name)
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.leave


def _logged(action: Callable[[], object], name: str) -> None:
    try:
        action()
    except Exception:
        logger.warning("%s is imported without what was to be done about it", name, exc_info=True)


class _Finder(MetaPathFinder):
    """Finds one module by the finders behind it, and has a part in its loading."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def leave(self) -> None:
        """Have no part in imports any more."""
        with suppress(ValueError):
            sys.meta_path.remove(self)

    def loaded(self) -> None:
        """The module has been imported."""
        if self in sys.meta_path:  # not called off since it was found
            self.leave()
            _logged(self._action, self._name)


class _Loader(Loader):
    """The module's own loader, which the module gets back before its code runs."""

    def __init__(self, inner: Any, finder: _Finder) -> None:
        self._inner = inner
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._finder.loaded()
