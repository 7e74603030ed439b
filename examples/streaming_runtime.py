"""A toy runtime that streams its experts from disk, with the hooks where a real one has them.

    python examples/streaming_runtime.py --tokens 200

It computes nothing: a router that favours some experts chooses, the missing ones are read from a file, and the hooks
tell what happened. Then http://127.0.0.1:9464/metrics has it, and the figures of the run are printed at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import moe_telemetry as mt
from moe_telemetry import recorder as rec
from moe_telemetry.reports import lines

LAYERS, EXPERTS, TOP_K, SLOTS = 6, 32, 4, 10
EXPERT_BYTES = 64 << 10


class Layer:
    """One MoE layer: a pool with the experts used last, and the reads that a prefetch has under way."""

    def __init__(self, index: int, weights: int, reader: ThreadPoolExecutor) -> None:
        self.index = index
        self.weights = weights
        self.reader = reader
        self.pool: OrderedDict[int, bytes] = OrderedDict()
        self.predicted: set[int] = set()
        self.reads: dict[int, Future[bytes]] = {}
        self.submitted: float | None = None
        self.last: set[int] = set()
        rec.pool(index, capacity=SLOTS)  # at load, so that the layer's series begin at 0

    def read(self, expert: int, source: str, phase: str) -> bytes:
        """The expert's weights; a background thread names the phase for which it reads."""
        began = time.perf_counter()
        data = os.pread(self.weights, EXPERT_BYTES, (self.index * EXPERTS + expert) * EXPERT_BYTES)
        rec.read(source, len(data), time.perf_counter() - began, phase)
        return data

    def prefetch(self, phase: str) -> None:
        """While the layer before this one computes: predict, and hand the missing experts to the reader."""
        with rec.timed(rec.prefetch, "predict"):
            self.predicted = set(self.last)  # the last token's experts: the predictor that costs nothing
        with rec.timed(rec.prefetch, "submit"):
            missing = self.predicted - self.pool.keys()
            self.reads = {expert: self.reader.submit(self.read, expert, "prefetch", phase) for expert in missing}
            self.submitted = time.perf_counter()

    def promote(self) -> set[int]:
        """Put what has been read into the pool; the predicted experts whose read has finished."""
        if self.submitted is not None:
            rec.window(time.perf_counter() - self.submitted)
        with rec.timed(rec.prefetch, "promote"):
            ready = {expert for expert, read in self.reads.items() if read.done()}
            for expert in ready:
                self.place(expert, self.reads.pop(expert).result())
            rec.placed(len(ready))
        return ready

    def place(self, expert: int, data: bytes) -> None:
        """Into the pool, in the place of the expert that was used longest ago."""
        self.pool[expert] = data
        if len(self.pool) > SLOTS:
            self.pool.popitem(last=False)
            rec.evicted(self.index)

    def run(self, experts: set[int], phase: str) -> None:
        """The layer itself."""
        ready = self.promote()
        # After promote and before acquire: what is resident now is a hit, whatever brought it.
        rec.routed(self.index, experts, resident=set(self.pool), predicted=self.predicted, ready=ready)
        missing = experts - self.pool.keys()
        if missing:
            with rec.timed(rec.stall):
                for expert in missing:
                    late = self.reads.pop(expert, None)
                    self.place(expert, late.result() if late else self.read(expert, "demand", phase))
        for expert in experts & self.pool.keys():
            self.pool.move_to_end(expert)
        with rec.timed(rec.block, "matmul"):
            time.sleep(0.0002)
        rec.block_call()
        self.last = experts


def forward(layers: list[Layer], tokens: int, phase: str, chance: random.Random) -> None:
    """One forward pass of so many tokens."""
    rec.forward(tokens, phase)  # the phase is named: chunks of a prefill may be as short as decode passes
    with rec.timed(rec.forward_done):  # also when the pass raises: no pass seems to hang
        for layer in layers:
            kept = {expert for expert in layer.last if chance.random() < 0.6}
            fresh = {round(chance.gauss(layer.index * 5, 4)) % EXPERTS for _ in range(tokens * TOP_K)}
            experts = set([*kept, *(fresh - kept)][: tokens * TOP_K])
            following = layers[(layer.index + 1) % LAYERS]
            following.prefetch(phase)
            layer.run(experts, phase)
    rec.tokens(tokens, phase)


def main() -> None:
    """Answer some prompts and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200, help="to decode")
    parser.add_argument("--port", type=int, help="of the metrics (9464)")
    options = parser.parse_args()
    chance = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        mt.start(model="toy", runtime="example", num_layers=LAYERS, port=options.port) as telemetry,
        ThreadPoolExecutor(1) as reader,
    ):
        print(f"metrics at {telemetry.url}/metrics", flush=True)
        path = Path(folder, "experts.bin")
        path.write_bytes(os.urandom(LAYERS * EXPERTS * EXPERT_BYTES))
        weights = os.open(path, os.O_RDONLY)
        layers = [Layer(index, weights, reader) for index in range(LAYERS)]
        for done in range(0, options.tokens, 50):
            began = time.perf_counter()
            for _ in range(4):
                forward(layers, 4, "prefill", chance)
            first = time.perf_counter() - began
            emitted = min(50, options.tokens - done)
            for _ in range(emitted):
                forward(layers, 1, "decode", chance)
            rec.request(first, time.perf_counter() - began, emitted)
        reader.shutdown()
        os.close(weights)
        print("\n".join(lines(mt.report(telemetry.snapshot()))))


if __name__ == "__main__":
    main()
