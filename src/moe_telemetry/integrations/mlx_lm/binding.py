"""Which decoder layer a SwitchGLU is of: found by walking the model that holds it, kept by identity (weakly)."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from moe_telemetry.store import Store, logger

Path = tuple[str | int, ...]
FUTILE_WALKS = 8
"""Walks of a model that did not find the module they were for, before the model is not walked again."""


_NO_LAYER = (
    '%s: its layer is not known, its routing is recorded with layer="none"; instrument(model=...) makes a model known '
    "that mlx_lm neither loaded nor runs"
)
_NO_EXPERTS = "%s: the number of its experts is not known, its routing is left out"


class Place:
    """Where a module with experts belongs: the decoder layer's number, None if unknown; and how many experts it has,
    0 if that is unknown."""

    __slots__ = ("experts", "layer", "ref")

    def __init__(self, ref: weakref.ref[Any], layer: int | None, experts: int) -> None:
        self.ref = ref
        self.layer = layer
        self.experts = experts


class _Model:
    __slots__ = ("drafts", "futile", "layers", "ref")

    def __init__(self, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.layers: tuple[int, ...] = ()
        self.futile = 0
        self.drafts = False


class Binding:
    """Models and their modules with experts, as long as they live. Ids of dead ones are never in the tables."""

    def __init__(self, module: type, switches: tuple[type, ...]) -> None:
        self._module = module
        self._switches = switches
        self._lock = threading.RLock()
        self._models: dict[int, _Model] = {}
        self._places: dict[int, Place] = {}
        self.version = 0  # raised with every place that comes or goes
        self._told: set[str] = set()

    def knows(self, model: object) -> bool:
        """Whether the model was bound."""
        known = self._models.get(id(model))
        return known is not None and known.ref() is model

    def tops(self, given: object) -> list[Any]:
        """The modules behind what was given as a model: itself, or what an object of another kind holds."""
        if isinstance(given, self._module):
            return [given]
        return [value for value in getattr(given, "__dict__", {}).values() if isinstance(value, self._module)]

    def subclasses(self) -> list[type]:
        """Classes derived from those with experts, with a `__call__` of their own."""
        found: list[type] = []
        for kind in self._switches:
            found += kind.__subclasses__()
        for kind in found:
            found += kind.__subclasses__()
        return [kind for kind in found if "__call__" in vars(kind)]

    def bind(self, model: Any, drafts: bool = False) -> None:
        """Find the layers of all its modules with experts, anew if it was bound. `drafts`: for another model."""
        with self._lock:
            known = self._models.get(id(model))
            if known is None or known.ref() is not model:
                known = _Model(weakly(model, self._models))
                self._models[id(model)] = known
            found = [(module, path) for module, path in self._walk(model) if isinstance(module, self._switches)]
            layers = _layers([path for _, path in found])
            for (module, path), layer in zip(found, layers, strict=True):
                self._put(module, layer, path)
            known.layers = tuple(sorted({layer for layer in layers if layer is not None}))
            known.drafts = known.drafts or drafts

    def place(self, switch: object) -> Place | None:
        """Where the module belongs; None if that was never found out."""
        place = self._places.get(id(switch))
        return place if place is not None and place.ref() is switch else None

    def find(self, switch: Any, model: Any) -> Place:
        """Walk the model again for a module that is not known; if it is not there, its layer is unknown."""
        with self._lock:
            known = self._models.get(id(model))
            if model is not None and (known is None or known.futile < FUTILE_WALKS):
                self.bind(model)
                if (place := self.place(switch)) is not None:
                    return place
                self._models[id(model)].futile += 1
            return self._put(switch, None, ())

    def declare(self, store: Store) -> None:
        """Make the layers of all models known, so that their counters exist at 0 before the first event (D9)."""
        for model in list(self._models.values()):
            if model.ref() is not None and not model.drafts:
                for layer in model.layers:
                    store.layer(layer)

    def _put(self, switch: Any, layer: int | None, path: Path) -> Place:
        number = self._experts(switch)
        told = _NO_EXPERTS if not number else _NO_LAYER if layer is None else None
        if told is not None and told not in self._told:
            self._told.add(told)
            logger.warning(told, ".".join(map(str, path)) or type(switch).__name__)
        place = Place(weakly(switch, self._places, self._moved), layer, number)
        self._places[id(switch)] = place
        self._moved()
        return place

    def _moved(self) -> None:
        self.version += 1

    def _experts(self, switch: Any) -> int:
        """Length of the first axis of the weights, which are (experts, out, in)."""
        for module, _ in self._walk(switch):
            for value in module.values():
                shape: tuple[int, ...] = getattr(value, "shape", ())
                if len(shape) >= 3:
                    return shape[0]
        return 0

    def _walk(self, root: Any) -> Iterator[tuple[Any, Path]]:
        """Every module below `root` once, itself included, in the order of the model, with the path to it."""
        seen = {id(root)}
        stack: list[tuple[Any, Path]] = [(root, ())]
        while stack:
            value, path = stack.pop()
            if isinstance(value, self._module):
                yield value, path
                hidden = [item for item in vars(value).items() if isinstance(item[1], self._module)]
                children: list[tuple[Any, Any]] = [*value.items(), *hidden]  # type: ignore[attr-defined]
            else:
                children = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            for key, child in reversed(children):
                if isinstance(child, (dict, list, tuple)) and id(child) not in seen:
                    seen.add(id(child))
                    stack.append((child, (*path, key)))


def _layers(paths: list[Path]) -> list[int | None]:
    """Layer numbers for paths such as ("model", "layers", 5, "mlp", "switch_mlp"): the first index in each.

    A second list of layers (that of an attached module for drafting, say) whose numbers are those of the first has
    no numbers: the longest list is the decoder.
    """
    heads = [_head(path) for path in paths]
    lists: dict[Path, set[int]] = {}
    for head in heads:
        if head is not None:
            lists.setdefault(head[0], set()).add(head[1])
    sizes = Counter({prefix: len(numbers) for prefix, numbers in lists.items()})
    taken: set[int] = set()
    numbered: set[Path] = set()
    for prefix, _ in sizes.most_common():
        if not lists[prefix] & taken:
            numbered.add(prefix)
            taken |= lists[prefix]
    return [head[1] if head is not None and head[0] in numbered else None for head in heads]


def _head(path: Path) -> tuple[Path, int] | None:
    for at, part in enumerate(path):
        if isinstance(part, int) or part.isdecimal():
            return path[:at], int(part)
    return None


def weakly(value: Any, table: dict[int, Any], gone: Callable[[], None] | None = None) -> weakref.ref[Any]:
    """A reference that takes the entry out of the table when the object dies, before its id can be another's; then
    calls `gone`."""
    key = id(value)

    def forget(ref: weakref.ref[Any]) -> None:
        entry = table.get(key)
        if entry is not None and entry.ref is ref:
            table.pop(key, None)
            if gone is not None:
                gone()

    return weakref.ref(value, forget)
