"""What goes on in a thread that runs a model: what its passes are for, and the pass in progress."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from moe_telemetry.hooks import Phase
from moe_telemetry.store import Store

from .binding import Place

if TYPE_CHECKING:
    from moe_telemetry.adding import Packing

_INPUTS = ("inputs", "input_ids", "input_tokens", "tokens", "x")
_EMBEDDINGS = ("input_embeddings", "inputs_embeds", "input_embeds")


class Work(Protocol):
    """What a thread's passes are made for."""

    def is_draft(self, model: object) -> bool:
        """Whether the model only proposes tokens to the one that is recorded; its passes are left out."""

    def begins(self, model: object, sequences: int, length: int, now: float) -> Phase | None:
        """A pass over `sequences` by `length` tokens begins; None: it is not of this work."""


def _nowhere(module: object) -> None:
    """In the place of a list's `append`, where there is no list."""


class Open:
    """A pass in progress: the outermost call of a model."""

    __slots__ = ("called", "calls", "ident", "indices", "kept", "last", "packed", "packing", "store")

    def __init__(self) -> None:
        self.ident = get_ident()
        self.store: Store | None = None  # where it was begun
        self.calls: list[Any] | None = None  # modules with experts called so far; None where that is not recorded
        self.called: Callable[[Any], None] = _nowhere
        self.indices: list[Any] = []  # theirs
        self.kept = self.indices.append
        self.packing: Packing | None = None  # how those are to be packed, when `last` is called
        self.last: Any = None
        self.packed: Any = None


class Places:
    """Where the modules belong that a pass calls, for passes that call the same ones.

    `version` is the binding's, `ids` theirs; `layers` and `experts` are of those `kept` (positions; None: all), the
    others' experts being unknown. `packing` is how their indices are packed, and `last` the last module, weakly.
    """

    __slots__ = ("experts", "ids", "kept", "last", "layers", "packing", "version")

    def __init__(self, version: int, switches: Sequence[Any], places: Sequence[Place], indices: Sequence[Any]) -> None:
        self.version = version
        self.ids = list(map(id, switches))
        kept = [at for at, place in enumerate(places) if place.experts]
        self.layers = tuple(places[at].layer for at in kept)
        self.experts = tuple(places[at].experts for at in kept)
        self.kept = kept if len(kept) < len(places) else None
        self.packing: Packing | None = None
        if self.kept is None and len({array.dtype for array in indices}) == 1:
            from moe_telemetry.adding import packing

            self.packing = packing(len(indices), indices[0].dtype)
        self.last: Callable[[], Any] = _nobody if self.packing is None else weakref.ref(switches[-1])


UNSEEN = Open()
"""A pass that was begun while nothing was recorded: what is left of it when that begins is of an unknown phase."""


class Thread(threading.local):
    """What goes on in the calling thread."""

    def __init__(self) -> None:
        self.ident = get_ident()

    work: Work | None = None
    open: Open | None = None
    places: Places | None = None  # of the last pass
    routed = False  # in a module with experts whose routing was recorded, and that may call another
    selected: tuple[Phase | None, int] | None = None  # what the recorder was last told of
    store: Store | None = None  # where a pass of this thread is in progress
    arrival: float | None = None  # when the request came in that is being prepared
    looks = False  # the thread looks for requests between others: what is outstanding can wait until then
    owes = False  # and now there is something outstanding


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Sequences and tokens a sequence of a model's inputs; (0, 0) if there is no telling. No value is read."""
    if args and kwargs.keys().isdisjoint(_EMBEDDINGS):  # the usual case
        given: Any = getattr(args[0], "shape", ())
        if len(given) == 2:
            return given[0], given[1]
    inputs = args[0] if args else next((kwargs[name] for name in _INPUTS if name in kwargs), None)
    embeddings = next((kwargs[name] for name in _EMBEDDINGS if kwargs.get(name) is not None), None)
    shapes = [tuple(getattr(given, "shape", ())) for given in (embeddings, inputs)]
    for shape in shapes:
        if len(shape) > 1:
            return shape[0], shape[1]
        if shape:
            return 1, shape[0]
    return 0, 0


def _nobody() -> None:
    return None
