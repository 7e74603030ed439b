"""The seed module by its description (sums in plain dicts): what the drop-in's dicts are held against.

`Reference(without="...")` leaves one rule out, to show that a test against the reference would notice.
"""

from __future__ import annotations

from typing import Any

RULES = (
    "decode apart",
    "evicted when ready",
    "recount of repeated ids",
    "zero keeps its type",
    "n_calls reset",
    "layers from zero",
    "count added",
    "calls of unions",
    "order of additions",
)


class Reference:
    """The dicts and the functions. What raises in the seed raises here."""

    def __init__(self, without: str = "") -> None:
        assert without in ("", *RULES)
        self._without = without
        self.PROF: dict[str, Any] = dict.fromkeys(("route", "pyremap", "fetch", "matmul", "combine"), 0.0)
        self.PROF["n_calls"] = 0
        self.WINDOW_PROF: dict[str, Any] = {"sum_s": 0.0, "n": 0}
        self.PREDICT_RECALL_PROF: dict[str, Any] = {"hit": 0, "routed": 0, "n": 0}
        self.PREFETCH_TPROF: dict[str, Any] = {}
        for stage in ("predict", "submit", "promote"):
            self.PREFETCH_TPROF |= {f"{stage}_s": 0.0, f"{stage}_n": 0}
        self.PREFETCH_TPROF |= {"take_s": 0.0, "route_s": 0.0, "place_s": 0.0, "place_experts": 0}
        everything = ("routed", "resident_hit", "miss_A_predicted", "miss_B_unpredicted", "n")
        decode = ("routed", "resident_hit", "miss_A", "miss_B", "n", "miss_A_timing", "miss_A_evicted")
        self.MISS_ATTRIB = dict.fromkeys((*everything, *(f"dec_{name}" for name in decode)), 0)
        self.UNION_PROF: dict[int, list[int]] = {}
        self.UNION_SAMPLES: dict[int, dict[int, list[int]]] = {}

    def has(self, rule: str) -> bool:
        return rule != self._without

    def tick(self, seg: str, seconds: float) -> None:
        self.PROF[seg] += seconds if self.has("order of additions") else round(seconds, 12)

    def note_tprof(self, seg: str, dt: float, count_key: str | None = None, count: int = 1) -> None:
        self.PREFETCH_TPROF[seg] += dt
        if count_key is not None:
            self.PREFETCH_TPROF[count_key] += count if self.has("count added") else 1

    def note_miss_attrib(
        self, uniq: list[int], predicted: Any, resident: Any, is_decode: bool, ready: Any = None
    ) -> None:
        found = self.MISS_ATTRIB

        def rise(entry: str, of_decode: str) -> None:
            found[entry] += 1
            if is_decode and self.has("decode apart"):
                found[of_decode] += 1

        for expert in uniq if self.has("recount of repeated ids") else dict.fromkeys(uniq):
            rise("routed", "dec_routed")
            if expert in resident:
                rise("resident_hit", "dec_resident_hit")
            elif expert in (predicted or ()):
                rise("miss_A_predicted", "dec_miss_A")
                if is_decode:
                    finished = expert in (ready or ()) and self.has("evicted when ready")
                    found["dec_miss_A_evicted" if finished else "dec_miss_A_timing"] += 1
            else:
                rise("miss_B_unpredicted", "dec_miss_B")
        rise("n", "dec_n")

    def note_union(self, seq: int, size: int, layer: int = -1) -> None:
        sums = self.UNION_PROF.setdefault(seq, [0, 0])
        sums[0] += size
        sums[1] += 1 if self.has("calls of unions") else size
        if layer > 0 or (layer == 0 and self.has("layers from zero")):
            self.UNION_SAMPLES.setdefault(seq, {}).setdefault(layer, []).append(size)

    def prof_reset(self) -> None:
        for key in self.PROF:
            if key != "n_calls" or self.has("n_calls reset"):
                self.PROF[key] = 0.0

    def tprof_reset(self) -> None:
        for key, value in self.PREFETCH_TPROF.items():
            self.PREFETCH_TPROF[key] = 0 if isinstance(value, int) and self.has("zero keeps its type") else 0.0

    def union_reset(self) -> None:
        self.UNION_PROF.clear()
        self.UNION_SAMPLES.clear()
