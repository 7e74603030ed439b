"""The seed module's hot functions, written anew from the description of what they do: the baseline row.

Sums only, no distribution, no label: what a runtime pays today for its private dicts.
"""

from __future__ import annotations

from time import perf_counter

PROF = {"route": 0.0, "pyremap": 0.0, "fetch": 0.0, "matmul": 0.0, "combine": 0.0, "n_calls": 0}
_SECONDS = ("predict_s", "submit_s", "promote_s", "take_s", "route_s", "place_s")
PREFETCH_TPROF: dict[str, float] = dict.fromkeys(_SECONDS, 0.0)
PREFETCH_TPROF.update(dict.fromkeys(("predict_n", "submit_n", "promote_n", "place_experts"), 0))
UNION_ON = False
WINDOW_PROF = {"sum_s": 0.0, "n": 0}
PREDICT_RECALL_PROF = {"hit": 0, "routed": 0, "n": 0}
MISS_ATTRIB = dict.fromkeys(
    (
        *("routed", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "n"),
        *("dec_routed", "dec_resident_hit", "dec_miss_A", "dec_miss_B", "dec_n"),
        *("dec_miss_A_timing", "dec_miss_A_evicted"),
    ),
    0,
)
UNION_PROF: dict[int, list[int]] = {}
UNION_SAMPLES: dict[int, dict[int, list[int]]] = {}


def _tick(segment: str, begin: float) -> None:
    """Seconds since `begin` into a segment's sum."""
    PROF[segment] += perf_counter() - begin


def note_tprof(segment: str, seconds: float, *, count_key: str | None = None, count: int = 1) -> None:
    """Seconds into a segment's sum, and a call into its count."""
    PREFETCH_TPROF[segment] += seconds
    if count_key is not None:
        PREFETCH_TPROF[count_key] += count


def note_union(seq: int, size: int, layer: int = -1) -> None:
    """A union's size: sum and calls by sequence length, and every sample by layer."""
    seq, size = int(seq), int(size)
    sums = UNION_PROF.setdefault(seq, [0, 0])
    sums[0] += size
    sums[1] += 1
    if layer >= 0:
        UNION_SAMPLES.setdefault(seq, {}).setdefault(int(layer), []).append(size)


def note_miss_attrib(
    routed: set[int], predicted: set[int] | None, resident: set[int], decode: bool, ready: set[int] | None = None
) -> None:
    """Each routed expert into one outcome, one by one, in all and for decode."""
    named, finished = predicted or set(), ready or set()
    for expert in routed:
        MISS_ATTRIB["routed"] += 1
        if decode:
            MISS_ATTRIB["dec_routed"] += 1
        if expert in resident:
            MISS_ATTRIB["resident_hit"] += 1
            if decode:
                MISS_ATTRIB["dec_resident_hit"] += 1
        elif expert in named:
            MISS_ATTRIB["miss_A_predicted"] += 1
            if decode:
                MISS_ATTRIB["dec_miss_A"] += 1
                MISS_ATTRIB["dec_miss_A_evicted" if expert in finished else "dec_miss_A_timing"] += 1
        else:
            MISS_ATTRIB["miss_B_unpredicted"] += 1
            if decode:
                MISS_ATTRIB["dec_miss_B"] += 1
    MISS_ATTRIB["n"] += 1
    if decode:
        MISS_ATTRIB["dec_n"] += 1


def reset_samples() -> None:
    """Forget the samples, or a long benchmark measures the memory they take."""
    UNION_SAMPLES.clear()
