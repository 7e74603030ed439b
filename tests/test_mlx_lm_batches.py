"""BatchGenerator under `instrument()`: chunks, steps and the requests among them."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_lm
import mlx_lm.server
from mlx_lm_tiny import PROMPT, Witness, durations, generate, lost, routing, seen, tiny, tokenizer

import moe_telemetry as mt
from moe_telemetry.integrations import mlx_lm as integration
from moe_telemetry.testing import Capture, capture

TTFT, TPOT, REQUEST = (
    "gen_ai.server.time_to_first_token",
    "gen_ai.server.time_per_output_token",
    "gen_ai.server.request.duration",
)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """On the CPU every fused function is translated by a C++ compiler first."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def model() -> Any:
    return tiny()


@pytest.fixture
def captured(recorder: mt.Recorder) -> Iterator[Capture]:
    """mlx_lm instrumented, and what it tells."""
    with capture(recorder=recorder) as found:
        integration.instrument(recorder=recorder)
        try:
            yield found
        finally:
            integration.uninstrument()
        assert 0 == lost(found)
        assert {} == found.store.active


def tokens(captured: Capture) -> tuple[float, float]:
    return captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode")


def test_figures_of_batch_generate(model: Any, captured: Capture) -> None:
    """Tokens, steps and requests are mlx_lm's; it leaves each prompt's last token out, which is processed, too."""
    prompts = [PROMPT, PROMPT[:5], PROMPT[:1], PROMPT[2:]]
    with Witness(model).watching() as witness:
        found = mlx_lm.batch_generate(
            model, tokenizer(), prompts, max_tokens=[4, 9, 3, 6], prefill_step_size=4, prefill_batch_size=2
        )
    assert (sum(map(len, prompts)), 4 + 9 + 3 + 6) == tokens(captured)
    assert (found.stats.prompt_tokens + len(prompts), found.stats.generation_tokens) == tokens(captured)
    assert found.stats.generation_steps == durations(captured)["decode", "1"]
    assert 4 == seen(captured, REQUEST)[0] == seen(captured, TTFT)[0] == seen(captured, TPOT)[0]
    assert 0 < seen(captured, "moe.forward.duration")[1] <= found.stats.prompt_time + found.stats.decode_time
    # Each step, and the pass over the last prompt tokens of those that begin to generate together, has one token.
    steps = found.stats.generation_steps
    chunks = [length for length in witness.lengths if length > 1]
    assert len(witness.lengths) > len(chunks) + steps
    assert sum(durations(captured).values()) == steps + sum(1 for phase, _ in durations_by_chunk(captured))


def durations_by_chunk(captured: Capture) -> list[tuple[str, str]]:
    """(phase, seq) of each prefill chunk that has a duration."""
    return list(Counter({key: count for key, count in durations(captured).items() if key[0] == "prefill"}).elements())


def test_passes_of_a_batch(model: Any, captured: Capture) -> None:
    """Chunks have their padded length and their real tokens; the last prompt tokens' pass has no duration."""
    generator = generate.BatchGenerator(model, prefill_step_size=4)
    with Witness(model).watching() as witness:
        generator.insert([PROMPT, PROMPT[:6]], [2, 2])
        while generator.next_generated():
            pass
    generator.close()
    # Prompts of 11 and 6: chunks of 4+4 and 4+1 tokens, then the shorter one generates while the other reads 2 more.
    assert [4, 4] == witness.lengths[:2]
    assert 17 == tokens(captured)[0]
    assert (2, 1) == (durations(captured)["prefill", "4"], durations(captured)["prefill", "2"])
    ones = [number for number, length in enumerate(witness.lengths) if length == 1]
    assert 2 + durations(captured)["decode", "1"] == len(ones)  # two of them read last prompt tokens
    calls, _ = routing(captured)
    assert len(ones) - 2 == calls["decode", "2"]
    assert len(witness.lengths) - len(ones) + 2 == calls["prefill", "0"]


def test_routing_of_a_batch(model: Any, captured: Capture) -> None:
    """Unions are over all sequences of a pass."""
    with Witness(model).watching() as witness:
        mlx_lm.batch_generate(model, tokenizer(), [PROMPT, PROMPT], max_tokens=5, prefill_step_size=4)
    assert [4, 4, 2, 1] + [1] * 5 == witness.lengths
    assert witness.routing(["prefill"] * 4 + ["decode"] * 5, dead=(0, 1, 2)) == routing(captured)


def test_requests_that_come_later(model: Any, captured: Capture) -> None:
    """Each one's time counts from its own insertion, and the wait for a place in the batch is in it."""
    generator = generate.BatchGenerator(model, completion_batch_size=1, prefill_batch_size=1)
    generator.insert([PROMPT], [3])
    generator.next()
    generator.insert([PROMPT[:4]], [2])
    time.sleep(0.05)
    began = time.perf_counter()
    while generator.next_generated():
        pass
    passed = time.perf_counter() - began
    (count, duration), (_, ttft) = seen(captured, REQUEST), seen(captured, TTFT)
    assert 2 == count
    assert 2 * 0.05 < ttft < duration < 2 * (0.05 + passed + 0.5)
    generator.close()


def test_the_end_token_ends_a_request(model: Any, captured: Capture) -> None:
    """A sequence that stops is a request of as many tokens as mlx_lm says, its last one included."""
    plain = mlx_lm.batch_generate(model, tokenizer(), [PROMPT], max_tokens=4, return_token_ids=True).token_ids[0]
    words = tokenizer(eos=True)
    words._eos_token_ids = {plain[1]}
    found = mlx_lm.batch_generate(model, words, [PROMPT], max_tokens=50)
    assert 2 == found.stats.generation_tokens
    assert 4 + 2 == tokens(captured)[1]
    assert 2 == seen(captured, REQUEST)[0]


def test_removed_requests_are_forgotten(model: Any, captured: Capture) -> None:
    """What was removed is no request, wherever it was on its way; nothing is kept of it."""
    generator = generate.BatchGenerator(model, completion_batch_size=2, prefill_batch_size=1, prefill_step_size=4)
    uids = generator.insert([PROMPT, PROMPT, PROMPT[:3], PROMPT], [9, 9, 9, 9])
    for _ in range(5):
        generator.next()
    generator.remove(uids[:1])
    generator.remove(uids[1:3])
    while generator.next_generated():
        pass
    assert 1 == seen(captured, REQUEST)[0]
    generator.insert([PROMPT], [9])
    generator.next()
    generator.remove([uids[-1] + 1], return_prompt_caches=True)
    assert ([], []) == generator.next()
    assert 1 == seen(captured, REQUEST)[0]
    generator.close()
    alive = weakref.ref(generator)
    del generator
    gc.collect()
    assert alive() is None


def test_figures_are_whole_when_the_batch_is_empty(model: Any, captured: Capture) -> None:
    """Nothing is outstanding on the device once the last sequence has finished, or was removed."""
    calls = captured.store.rows
    mlx_lm.batch_generate(model, tokenizer(), [PROMPT], max_tokens=3)
    assert 3 == calls["decode", 1].layers[0].unknown  # read without waiting for anything
    generator = generate.BatchGenerator(model)
    uids = generator.insert([PROMPT], [30])
    for _ in range(4):
        generator.next()
    before = calls["decode", 1].layers[0].unknown
    generator.remove(uids)
    assert before < calls["decode", 1].layers[0].unknown
    generator.close()


def test_a_request_that_ends_unseen(model: Any, recorder: mt.Recorder) -> None:
    """One that telemetry has not seen ending is not under way for ever: figures are whole behind the next one."""
    integration.instrument(recorder=recorder)
    generator = generate.BatchGenerator(model)
    with capture(recorder=recorder):
        generator.insert([PROMPT], [3])
        generator.next()
    while generator.next_generated():
        pass
    with capture(recorder=recorder) as found:
        generator.insert([PROMPT], [3])
        while generator.next_generated():
            pass
        assert 3 == found.store.rows["decode", 1].layers[0].unknown  # read without waiting for anything
    integration.uninstrument()
    generator.close()


def test_no_answer_of_the_server_waits_for_the_figures(model: Any, captured: Capture) -> None:
    """Where a thread looks for requests between others, as the server's does, it counts what is outstanding there."""
    queue = SimpleNamespace(requests=SimpleQueue(), _is_distributed=False, _share_request=lambda request: request)

    def look() -> None:
        assert mlx_lm.server.ResponseGenerator._next_request(queue) is None

    def single() -> None:
        mlx_lm.generate(model, tokenizer(), PROMPT, max_tokens=3)

    def batch() -> None:
        mlx_lm.batch_generate(model, tokenizer(), [PROMPT], max_tokens=3)

    def removed() -> None:
        generator = generate.BatchGenerator(model)
        uids = generator.insert([PROMPT], [30])
        for _ in range(5):
            generator.next()
        generator.remove(uids)
        generator.close()

    def counted() -> int:
        return sum(cells.unknown for cells in captured.store.row("decode", 1).layers.values())

    look()
    for number, work in enumerate((single, batch, removed)):
        work()
        assert 9 * number == counted()  # three layers in three passes each time
        look()
        assert 9 * (number + 1) == counted()
    assert 2 == seen(captured, REQUEST)[0]


def test_an_error_of_the_model_passes(model: Any, captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very exception arrives, and no pass seems to be in progress."""
    error = RuntimeError("out of memory")
    generator = generate.BatchGenerator(model)
    generator.insert([PROMPT], [5])
    generator.next()
    generator.next()
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise error

        patch.setattr(type(model.layers[0]), "__call__", fail)
        with pytest.raises(RuntimeError) as raised:
            generator.next()
    assert error is raised.value
    assert {} == captured.store.active
    with pytest.raises(ValueError, match="empty prompt"):
        generator.insert([[]])
    generator.close()


def test_a_batch_without_a_generator(model: Any, captured: Capture) -> None:
    """The batches themselves are recorded without requests, which only BatchGenerator has."""
    sampler = generate.greedy_sampler
    batch = generate.PromptProcessingBatch(
        *(model, [0], [mlx_lm.models.cache.make_prompt_cache(model)]),
        **{"tokens": [[]], "fallback_sampler": sampler, "max_tokens": [3]},
        **{"samplers": [None], "logits_processors": [()], "stop_sequences": [generate.StopSequences(None)]},
    )
    running = batch.generate([PROMPT])
    assert 3 == sum(len(running.next()) for _ in range(3))
    assert [] == running.next()
    assert (11, 3) == tokens(captured)
    assert {("prefill", "10"): 1, ("decode", "1"): 3} == durations(captured)
    assert 0 == seen(captured, REQUEST)[0]


def test_a_batch_begun_without_telemetry(model: Any, recorder: mt.Recorder) -> None:
    """Sequences inserted before have no request, and their tokens count from then on."""
    integration.instrument(recorder=recorder)
    generator = generate.BatchGenerator(model)
    generator.insert([PROMPT], [5])
    for _ in range(4):
        generator.next()
    with capture(recorder=recorder) as found:
        while generator.next_generated():
            pass
        assert 0 == lost(found)
        assert (0, 3) == tokens(found)
        assert 0 == seen(found, REQUEST)[0]
        assert {("decode", "0"), ("decode", "1"), ("decode", "2")} == set(routing(found)[0])
    integration.uninstrument()
    generator.close()
