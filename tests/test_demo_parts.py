"""The demo's parts one by one: disk, background reader, pool, attention cache, text."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from moe_telemetry import Phase
from moe_telemetry.demo.blobs import ExpertBlobs, layer_weights, open_blobs
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.disk import SimulatedDisk
from moe_telemetry.demo.model import KVCache, ResidentModel
from moe_telemetry.demo.pool import LayerPool
from moe_telemetry.demo.reader import PrefetchReader, State, Ticket
from moe_telemetry.demo.text import BigramDraft, LoopedText, load_text

TINY = ModelConfig(layers=2, experts=8, top_k=2, width=8, hidden=8)
SECONDS_A_READ = 0.02


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[ExpertBlobs]:
    """The experts of a tiny model."""
    with open_blobs(tmp_path, TINY, 0, lambda line: None) as opened:
        yield opened


def slow_disk() -> SimulatedDisk:
    """A disk that delivers one tiny expert in `SECONDS_A_READ`."""
    return SimulatedDisk(TINY.expert_bytes / SECONDS_A_READ / 1e6)


def until_done(reader: PrefetchReader, ticket: Ticket) -> None:
    """Wait for a read without claiming it."""
    deadline = time.perf_counter() + 10
    while not reader.is_done(ticket):
        assert time.perf_counter() < deadline
        time.sleep(0.001)


def test_reads_take_the_time_of_their_bandwidth(blobs: ExpertBlobs) -> None:
    """Ten reads last ten times as long as one, however fast the page cache is."""
    disk, place = slow_disk(), memoryview(bytearray(TINY.expert_bytes))
    began = time.perf_counter()
    fd, offset = blobs.locate(0, 3)
    seconds = [disk.read_demand(fd, [place], offset) for _ in range(10)]
    assert time.perf_counter() - began >= 10 * SECONDS_A_READ
    assert min(seconds) >= 0.9 * SECONDS_A_READ
    assert layer_weights(TINY, 0, 0)[3].tobytes() == bytes(place)


def test_a_demand_read_goes_before_a_prefetch(blobs: ExpertBlobs) -> None:
    """A demand read during a prefetch takes its own time only, and the prefetch that much longer."""
    disk = slow_disk()
    took: list[float] = []

    def prefetch() -> None:
        fd, offset = blobs.locate(0, 0)
        took.append(disk.read_prefetch(fd, [memoryview(bytearray(TINY.expert_bytes))], offset))

    disk.slowdown = 5.0
    thread = threading.Thread(target=prefetch)
    thread.start()
    time.sleep(SECONDS_A_READ)
    fd, offset = blobs.locate(0, 1)
    demand = disk.read_demand(fd, [memoryview(bytearray(TINY.expert_bytes))], offset)
    thread.join()
    assert 5 * SECONDS_A_READ <= demand < 8 * SECONDS_A_READ
    assert took[0] >= 10 * SECONDS_A_READ


def test_stop_ends_the_pace(blobs: ExpertBlobs) -> None:
    """A read on a hopeless disk returns soon after the run is stopped, with the right bytes."""
    disk, place = SimulatedDisk(1e-6), memoryview(bytearray(TINY.expert_bytes))
    threading.Timer(0.05, disk.stop.set).start()
    fd, offset = blobs.locate(1, 2)
    assert disk.read_demand(fd, [place], offset) < 5
    assert layer_weights(TINY, 0, 1)[2].tobytes() == bytes(place)


def test_the_reader_delivers_what_was_submitted(blobs: ExpertBlobs) -> None:
    """Every submitted expert arrives, split over the buffers of its slot, and staging memory is used again."""
    reader = PrefetchReader(blobs, SimulatedDisk(1e5), TINY.expert_bytes, depth=8, staging=2)
    weights = layer_weights(TINY, 0, 1).tobytes()
    for expert in range(TINY.experts):
        ticket = reader.submit(1, expert, Phase.DECODE)
        assert ticket is not None
        until_done(reader, ticket)
        first, second = memoryview(bytearray(64)), memoryview(bytearray(TINY.expert_bytes - 64))
        reader.deliver(ticket, (first, second))
        start = expert * TINY.expert_bytes
        assert weights[start : start + TINY.expert_bytes] == bytes(first) + bytes(second)
    reader.close()


class Gate(SimulatedDisk):
    """A disk that delivers once `open` is set, or fails then."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__(1e5)
        self.open = threading.Event()
        self.asked = threading.Event()
        self.error = error

    def read_prefetch(self, fd: int, buffers: Sequence[memoryview], offset: int) -> float:
        """Wait for the gate."""
        self.asked.set()
        assert self.open.wait(10)
        if self.error is not None:
            raise self.error
        return super().read_prefetch(fd, buffers, offset)


def test_the_reader_refuses_withdraws_and_waits(blobs: ExpertBlobs) -> None:
    """A full queue refuses; a read that has not begun is withdrawn, one under way is waited for."""
    disk = Gate()
    reader = PrefetchReader(blobs, disk, TINY.expert_bytes, depth=2, staging=1)
    under_way = reader.submit(0, 0, Phase.DECODE)
    assert disk.asked.wait(10)
    queued, _, refused = (reader.submit(0, expert, Phase.DECODE) for expert in (1, 2, 3))
    assert under_way is not None
    assert queued is not None
    assert refused is None
    assert not reader.wait(queued)
    assert queued.state is State.DROPPED
    threading.Timer(0.05, disk.open.set).start()
    assert reader.wait(under_way)
    reader.deliver(under_way, ())
    reader.close()


def test_a_read_that_fails_fails_those_behind_it(blobs: ExpertBlobs) -> None:
    """Whoever waits for a read that was queued behind the failed one has its error; giving one up is no error."""
    disk = Gate(OSError("gone"))
    reader = PrefetchReader(blobs, disk, TINY.expert_bytes, depth=8, staging=2)
    under_way, queued, given_up = (reader.submit(0, expert, Phase.DECODE) for expert in (0, 1, 2))
    assert under_way is not None
    assert queued is not None
    assert given_up is not None
    assert disk.asked.wait(10)
    disk.open.set()
    reader.drain()
    reader.abandon(given_up)
    for ticket in (under_way, queued):
        with pytest.raises(OSError, match="gone"):
            reader.wait(ticket)
    reader.close()


def test_an_abandoned_read_gives_its_staging_back(blobs: ExpertBlobs) -> None:
    """With one staging buffer, a read given up under way does not block the next."""
    reader = PrefetchReader(blobs, slow_disk(), TINY.expert_bytes, depth=8, staging=1)
    given_up = reader.submit(0, 0, Phase.DECODE)
    assert given_up is not None
    time.sleep(SECONDS_A_READ / 4)
    reader.abandon(given_up)
    following = reader.submit(0, 1, Phase.DECODE)
    assert following is not None
    until_done(reader, following)
    reader.abandon(following)
    last = reader.submit(0, 2, Phase.DECODE)
    assert last is not None
    until_done(reader, last)
    reader.close()


def test_the_pool_evicts_the_coldest_that_is_not_pinned() -> None:
    """Use counts, age takes away, and a pinned expert stays however cold."""
    pool = LayerPool(TINY, 0, 3)
    for expert in (0, 1, 2):
        pool.insert(expert, ())
    pool.use({0, 1})
    pool.use({1})
    pool.insert(3, ())
    assert {0, 1, 3} == set(pool.slot_of)
    pool.insert(4, {3})
    assert {1, 3, 4} == set(pool.slot_of)
    with pytest.raises(RuntimeError, match="pinned"):
        pool.insert(5, {1, 3, 4})


def test_a_guess_does_not_displace_a_hot_expert() -> None:
    """Admission compares one use's worth of credit with the coldest resident."""
    pool = LayerPool(TINY, 0, 2)
    assert pool.admits(5, ())
    pool.insert(0, ())
    pool.insert(1, ())
    assert pool.admits(5, ())
    for _ in range(5):
        pool.use({0, 1})
    assert not pool.admits(5, ())
    pool.use({5})
    pool.use({5})
    pool.use({5})
    assert pool.admits(5, ())
    assert not pool.admits(5, {0, 1})


def test_a_slot_is_the_memory_that_the_matmul_reads() -> None:
    """Bytes written into an expert's slot appear in the pool's arrays, w_in and w_out, and nowhere else."""
    pool = LayerPool(TINY, 0, 3)
    flat = layer_weights(TINY, 0, 0)[6]
    w_in, w_out = pool.insert(6, ())
    w_in[:] = flat[: TINY.w_in_size].tobytes()
    w_out[:] = flat[TINY.w_in_size :].tobytes()
    slot = pool.slot_of[6]
    assert np.array_equal(flat[: TINY.w_in_size], np.array(pool.w_in[slot]).ravel())
    assert np.array_equal(flat[TINY.w_in_size :], np.array(pool.w_out[slot]).ravel())
    assert np.count_nonzero(np.array(pool.w_in)) == np.count_nonzero(flat[: TINY.w_in_size])


def test_resizing_keeps_what_fits() -> None:
    """A smaller pool loses the experts of the slots that go; a larger one has them free again."""
    pool = LayerPool(TINY, 0, 6)
    for expert in range(6):
        pool.insert(expert, ())
    kept = {expert for expert, slot in pool.slot_of.items() if slot < 2}
    pool.resize(2)
    assert kept == set(pool.slot_of)
    pool.insert(7, ())
    assert len(pool.slot_of) == 2
    pool.resize(6)
    for expert in range(4):
        pool.insert(expert, ())
    assert len(pool.slot_of) == len(set(pool.slot_of.values())) <= 6


def test_a_trimmed_cache_forgets_the_rejected() -> None:
    """Attention after extending by three and trimming two is attention after one, whole chunks or single tokens."""
    layer = ResidentModel(TINY, 0).layers[0]
    x = mx.random.normal((6, TINY.width), key=mx.random.key(0))
    straight, trimmed, chunked = KVCache(), KVCache(), KVCache()
    expected = [layer.attend(x[i : i + 1], straight) for i in range(4)]
    layer.attend(mx.concatenate([x[:1], x[4:]]), trimmed)
    trimmed.trim(2)
    actual = [layer.attend(x[i : i + 1], trimmed) for i in range(1, 4)]
    assert np.allclose(mx.concatenate(expected[1:]), mx.concatenate(actual), atol=1e-5)
    assert np.allclose(mx.concatenate(expected), layer.attend(x[:4], chunked), atol=1e-5)
    assert straight.length == trimmed.length == chunked.length == 4


def test_the_shipped_text_is_long_and_varied() -> None:
    """At least 10 KB, ASCII letters and code, so that routing changes along the way."""
    text = load_text(None)
    assert 10_000 <= len(text) <= 25_000
    assert len(set(text)) > 70
    assert b"def " in text


def test_a_text_goes_round() -> None:
    """Behind the last byte comes the first."""
    text = LoopedText(b"abc")
    text.advance(5)
    assert list(b"cabca") == text.peek(5)


def test_the_draft_proposes_the_commonest_follower_if_sure() -> None:
    """A byte that mostly has one follower gets a draft of the asked length, another gets none."""
    draft = BigramDraft(b"qu" * 10 + b"axayazabacad")
    assert list(b"uqu") == draft.propose(ord("q"), 3)
    assert draft.propose(ord("a"), 3) == []
    assert draft.propose(ord("!"), 3) == []


def test_importing_the_library_imports_no_mlx() -> None:
    """The library and the demo's settings need neither mlx nor numpy."""
    code = (
        "import sys, moe_telemetry, moe_telemetry.demo.settings; print({'mlx', 'mlx.core', 'numpy'} & set(sys.modules))"
    )
    source = str(Path(__file__).parents[1] / "src")
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "set()"
