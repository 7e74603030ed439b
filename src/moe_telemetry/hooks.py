"""The hooks a runtime calls, as the object it imports.

`Recorder` is the API and, at the same time, the state "off": every hook is a method that returns at once.
Starting telemetry changes the object's class to a live one and stopping changes it back, so a reference taken at
import time is right at any time and a disabled hook costs one empty call. The class is swapped
because methods shadowed on the instance cost a disabled hook half its speed for good after the first start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from .cells import SeqCells
    from .store import Store

_NOTHING: AbstractContextManager[None] = nullcontext()


class Phase(str, Enum):
    """What a forward pass does: read the prompt, or emit tokens. Verify passes of speculation are decode."""

    PREFILL = "prefill"
    DECODE = "decode"


class Recorder:
    """Hot-path hooks. Each one returns None and raises no Exception, whatever it is given.

    Common arguments: `layer` is the MoE layer's index (int, or anything equal to one: '3', 3.0, np.int64(3));
    None or a negative number is exported as ``layer="none"``. `seconds` is a duration in seconds, `experts` of a
    counting hook a number of experts, `nbytes` a number of bytes; numbers are Python or NumPy scalars, finite
    and not negative. Anything else, lazy arrays included, is dropped and counted in ``moe.telemetry.dropped``.

    An event belongs to the forward pass that its thread began last with `forward`; in a thread that never began
    one (a background reader), to the latest pass of the process; before any, to decode with one token.
    """

    # State of the live classes, here because only classes of one layout can be swapped.
    __slots__ = ("__weakref__", "_row", "_store")
    _row: SeqCells
    _store: Store

    # -- a forward pass ------------------------------------------------------------------------------------

    def forward(self, tokens: int, phase: Phase | str | None = None) -> None:
        """Begin a forward pass of `tokens` tokens per sequence.

        Without `phase` a pass of at most `decode_seq_max` tokens (8 by default) is decode. A prefill in small
        chunks must name it.
        """

    def forward_done(self, seconds: float) -> None:
        """End the pass begun by `forward` on this thread; `seconds` is its duration."""

    def tokens(self, n: int, phase: Phase | str | None = None) -> None:
        """Count tokens: prompt tokens processed (prefill), tokens emitted (decode: accepted drafts and own)."""

    def speculation(self, proposed: int, accepted: int) -> None:
        """Count one verify pass: draft tokens proposed, and how many of them were accepted."""

    def request(
        self, time_to_first_token: float | None, duration: float, output_tokens: int, *, idle: bool = True
    ) -> None:
        """Record a finished request; with two output tokens or more also the time per output token.

        Then counts what `routed_array` has outstanding on this thread, which waits for the device. A server that
        has other requests under way says so with ``idle=False``, and is not made to wait.
        """

    # -- routing and residency -----------------------------------------------------------------------------

    def routed(
        self,
        layer: int | None,
        experts: Iterable[int],
        resident: Iterable[int] | None = None,
        predicted: Iterable[int] | None = None,
        ready: Iterable[int] | None = None,
    ) -> None:
        """Record one MoE layer of one forward pass: call it after promote and before acquire.

        Args:
            layer: the layer's index.
            experts: ids of the experts the router chose, for all tokens of the pass; duplicates collapse.
            resident: ids in the pool now. None: residency unknown, no lookups are counted.
            predicted: every id the predictor chose, resident or not. None: no predictor, no recall is counted;
                an empty set is a prediction that found nothing.
            ready: predicted ids whose read has finished. None is empty: every predicted miss is then "timing".

        The routed experts fall into exactly one outcome each: hit (resident), miss_timing (predicted, not
        ready), miss_evicted (predicted and ready, not resident), miss_unpredicted.
        """

    def routed_array(
        self,
        layer: int | None,
        indices: mx.array,
        num_experts: int,
        resident: mx.array | Iterable[int] | None = None,
        predicted: mx.array | Iterable[int] | None = None,
        ready: mx.array | Iterable[int] | None = None,
    ) -> None:
        """Record what `routed` does without reading the routing, for a runtime that keeps it on the device.

        Args:
            layer: the layer's index. A layer that comes again begins a new pass.
            indices: the router's choice as a lazy MLX array of integer ids; any shape, last axis top-k.
            num_experts: experts of the layer, ids are below it.
            resident, predicted, ready: as for `routed`, each a bool array (num_experts,) or ids.

        The arrays are kept for 8 passes, reduced on the device, and counted two such batches later: `request` and
        `stop()` count what is outstanding, a `stop()` in another thread all but the thread's last pass, which it may
        be evaluating. Only what the model itself evaluates counts: a pass of which it evaluates nothing by the time
        it has evaluated a later one is dropped (``reason="unevaluated"``). Call it on the thread that makes the
        passes.
        """

    def union(self, layer: int | None, size: int, residency: str | None = None) -> None:
        """Record one layer call of which only the union's size is known.

        `residency` is ``all_hit``, ``partial``, ``bypassed`` (a fast path that keeps no counts) or None, unknown.
        """

    def recall(self, layer: int | None, predicted: Iterable[int], routed: Iterable[int]) -> None:
        """Record a prediction against the routed experts, where `routed` (the hook) was not given it."""

    # -- prefetch --------------------------------------------------------------------------------------------

    def prefetch(self, stage: str, seconds: float) -> None:
        """Host time of one prefetch stage of one layer: ``predict``, ``submit`` or ``promote``."""

    def promote(self, step: str, seconds: float) -> None:
        """Host time of one step inside promote: ``take``, ``route`` or ``place``."""

    def window(self, seconds: float) -> None:
        """Time from submit to promote of one layer: what a read can hide in."""

    def placed(self, experts: int = 1, phase: Phase | str | None = None) -> None:
        """Count experts that a prefetch wrote into the pool; `phase` as for `read`."""

    def prefetch_dropped(
        self, reason: str, experts: int = 1, nbytes: int = 0, phase: Phase | str | None = None
    ) -> None:
        """Count predicted experts that were not prefetched, or prefetched for nothing.

        `reason` is ``budget``, ``queue_full``, ``no_slot`` or ``unused`` (read, never used); `nbytes` is what
        was read for nothing, `phase` as for `read`.
        """

    # -- the MoE block ---------------------------------------------------------------------------------------

    def block(self, segment: str, seconds: float) -> None:
        """Host time of one segment of the MoE block: route, pyremap, fetch, matmul or combine."""

    def block_call(self) -> None:
        """Count one call of the MoE block."""

    # -- reads and the pool ----------------------------------------------------------------------------------

    def read(self, source: str, nbytes: int, seconds: float, phase: Phase | str | None = None) -> None:
        """Record one read of expert weights: `source` is ``demand`` or ``prefetch``.

        A background reader passes the `phase` for which the read was submitted; the default is the current one.
        """

    def stall(self, seconds: float) -> None:
        """Time the forward pass was blocked on experts."""

    def evicted(self, layer: int | None, experts: int = 1) -> None:
        """Count experts evicted from a layer's pool."""

    def degraded(self, mode: str, experts: int = 1) -> None:
        """Count experts served otherwise than by their weights: ``substituted``, ``skipped`` or ``cpu``."""

    def pool(self, layer: int | None, capacity: int | None = None, resident: int | None = None) -> None:
        """Declare a layer's pool: slots, and experts resident now. Call it at load, and when either changes."""

    # -- counters kept elsewhere -----------------------------------------------------------------------------

    def cumulative(self, metric: str, value: float, **labels: str | int) -> None:
        """Feed the absolute value of a counter kept in native code.

        `metric` is a catalog counter's OpenTelemetry name, `labels` all of its labels. The rise since the last
        value is added, the first value whole; a fall is a reset of the source and adds the new value.
        One poller a series: two that hand in values out of order look like resets. Layers over the budget are
        refused for the same reason.
        """

    # -- timing ----------------------------------------------------------------------------------------------

    def timed(self, hook: Callable[..., None], *args: Any) -> AbstractContextManager[None]:
        """Time a with-block and hand the seconds to `hook` behind `args`: ``with rec.timed(rec.block, "fetch")``."""
        return _NOTHING


HOOKS = tuple(name for name in vars(Recorder) if not name.startswith("_") and name != "timed")
"""Names of the hooks: the closed set of the label ``hook``."""

recorder = Recorder()
