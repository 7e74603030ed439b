"""generate_step and speculative_generate_step under `instrument()`: what is recorded, and what stays as it was."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_lm
from mlx_lm_tiny import EOS, PROMPT, Witness, durations, generate, lost, near, routing, seen, tiny, tokenizer

import moe_telemetry as mt
from moe_telemetry.integrations import mlx_lm as integration
from moe_telemetry.integrations.mlx_lm.generation import Generation
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
        assert 0 == lost(found) - found.total("moe.telemetry.dropped", reason="unevaluated")
        assert {} == found.store.active


def steps(model: Any, **options: Any) -> Any:
    return generate.generate_step(mx.array(PROMPT), model, **{"max_tokens": 6, "prefill_step_size": 4, **options})


# -- what is recorded ---------------------------------------------------------------------------------------------


def test_passes_of_a_generation(model: Any, captured: Capture) -> None:
    """Prompt chunks and the last prompt token are prefill, all else is decode; the pass thrown away has no duration."""
    with Witness(model).watching() as witness:
        assert 6 == len(list(steps(model)))
    assert [4, 4, 2, 1] + [1] * 6 == witness.lengths
    phases = ["prefill"] * 4 + ["decode"] * 6
    assert witness.routing(phases, dead=(0, 1, 2)) == routing(captured)
    assert {("prefill", "4"): 2, ("prefill", "2"): 1, ("prefill", "1"): 1, ("decode", "1"): 5} == durations(captured)
    assert (11, 6) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))


def test_a_request_is_one_generation(model: Any, captured: Capture) -> None:
    """It lasts from the first resumption to the last token, and the first token comes with the first value."""
    began = time.perf_counter()
    tokens = steps(model)
    next(tokens)
    first = time.perf_counter() - began
    time.sleep(0.02)
    for _ in range(5):
        next(tokens)
    whole = time.perf_counter() - began
    time.sleep(0.02)
    assert [] == list(tokens)
    number, ttft = seen(captured, TTFT)
    assert 1 == number
    assert 0 < ttft < first
    number, duration = seen(captured, REQUEST)
    assert 1 == number
    assert ttft + 0.02 < duration < whole
    number, per_token = seen(captured, TPOT)
    assert 1 == number
    assert per_token == pytest.approx((duration - ttft) / 5)


def test_the_consumers_time_is_not_the_passes(model: Any, captured: Capture) -> None:
    """A pass is charged with the time inside the generator only; a request has the time between its tokens, too."""
    slept = 0.0
    for number, _ in enumerate(steps(model)):
        began = time.perf_counter()
        time.sleep(0.03)
        slept += time.perf_counter() - began if number < 5 else 0
    _, spent = seen(captured, "moe.forward.duration")
    _, duration = seen(captured, REQUEST)
    assert 0.2 * (duration - slept) < spent <= duration - slept


def test_prefill_moves_while_it_runs(model: Any, captured: Capture) -> None:
    """Prompt tokens are counted chunk by chunk, each once it is evaluated."""
    moved = []

    def progress(*_: int) -> None:
        moved.append(captured.store.phases["prefill"].tokens)

    list(steps(model, prompt_progress_callback=progress))
    assert [0, 0, 4, 8, 10] == moved
    assert 11 == captured.store.phases["prefill"].tokens


def test_a_prompt_that_is_only_read(model: Any, captured: Capture) -> None:
    """Without a token to generate, as mlx_lm.cache_prompt does it, the prompt counts and no token comes first."""
    assert [] == list(steps(model, max_tokens=0))
    assert (11, 0) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))
    assert {("prefill", "4"): 2, ("prefill", "2"): 1, ("prefill", "1"): 1} == durations(captured)
    assert (1, 0) == (seen(captured, REQUEST)[0], seen(captured, TTFT)[0])


def test_embeddings_instead_of_tokens(model: Any, captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of embeddings has their length."""
    plain = type(model).__call__

    def call(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        read = inputs if input_embeddings is None else mx.zeros(input_embeddings.shape[:2], mx.uint32)
        return plain(self, read, cache)

    monkeypatch.setattr(type(model), "__call__", call)
    nothing, embeddings = mx.array([], mx.uint32), mx.zeros((5, 32))
    options = {"max_tokens": 2, "prefill_step_size": 3, "input_embeddings": embeddings}
    assert 2 == len(list(generate.generate_step(nothing, model, **options)))
    assert 5 == captured.total("moe.tokens", phase="prefill")
    assert {("prefill", "3"): 1, ("prefill", "1"): 2, ("decode", "1"): 1} == durations(captured)


def test_figures_of_stream_generate(model: Any, captured: Capture) -> None:
    """Tokens agree with mlx_lm's own counts, a text that its end token ends included."""
    endless = list(mlx_lm.stream_generate(model, tokenizer(), PROMPT, max_tokens=5))
    assert (endless[-1].prompt_tokens, endless[-1].generation_tokens) == (11, 5)
    words = tokenizer(eos=True)
    words._eos_token_ids = {endless[1].token}
    ended = list(mlx_lm.stream_generate(model, words, PROMPT, max_tokens=50))
    assert "stop" == ended[-1].finish_reason
    assert 2 == ended[-1].generation_tokens
    assert 5 + 2 == captured.total("moe.tokens", phase="decode")
    assert 11 + 11 == captured.total("moe.tokens", phase="prefill")
    assert 2 == seen(captured, REQUEST)[0] == seen(captured, TTFT)[0]


def test_two_generations_in_turn(model: Any, captured: Capture) -> None:
    """Generators that are resumed in turn on one thread keep their phases, requests and passes apart."""
    first, second = steps(model), steps(model, prefill_step_size=20)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
    assert (22, 12) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))
    assert 2 == seen(captured, REQUEST)[0]
    counts = {("prefill", "4"): 2, ("prefill", "2"): 1, ("prefill", "10"): 1, ("prefill", "1"): 2, ("decode", "1"): 10}
    assert counts == durations(captured)


def test_a_pass_is_in_progress_until_it_is_evaluated(model: Any, captured: Capture) -> None:
    """Its age is that of what the caller waits for, not of building a graph."""
    active = []

    def sampler(logprobs: mx.array) -> mx.array:
        active.extend(phase for phase, _ in captured.store.active.values())
        return mx.argmax(logprobs, axis=-1)

    for _ in steps(model, sampler=sampler, max_tokens=3):
        assert {} == captured.store.active
    assert ["prefill", "decode", "decode", "decode"] == active
    del active[:]
    generator = generate.BatchGenerator(model, sampler=sampler)
    generator.insert([PROMPT], [3])
    while generator.next_generated():
        assert {} == captured.store.active
    generator.close()
    assert ["prefill", *["decode"] * 3] == active


def test_a_generation_within_another(model: Any, captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt before it is entered leaves the outer one's passes to that."""
    plain = [token for token, _ in steps(model)]
    once = durations(captured)
    enter, interrupted = Generation.enter, []

    def interrupt(self: Generation) -> None:
        raise KeyboardInterrupt

    def progress(*_: int) -> None:
        if not interrupted:
            interrupted.append(True)
            monkeypatch.setattr(Generation, "enter", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(steps(model))
            monkeypatch.setattr(Generation, "enter", enter)

    assert plain == [token for token, _ in steps(model, prompt_progress_callback=progress)]
    assert {key: 2 * count for key, count in once.items()} == durations(captured)


# -- speculation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.02, 1.0], ids=["right", "now-and-then", "wrong"])
def test_speculation_agrees_with_mlx_lm(model: Any, captured: Capture, noise: float) -> None:
    """Accepted tokens are those that mlx_lm names as the draft's, rejected the others that were verified."""
    draft = near(model, noise)
    with Witness(model).watching() as witness:
        responses = list(
            mlx_lm.stream_generate(
                *(model, tokenizer(), PROMPT),
                **{"max_tokens": 20, "draft_model": draft, "num_draft_tokens": 3, "prefill_step_size": 6},
            )
        )
    verified = witness.lengths[2:]
    accepted = sum(response.from_draft for response in responses)
    assert [6, 4] == witness.lengths[:2]
    assert accepted == captured.total("moe.speculation.tokens", outcome="accepted")
    assert sum(verified) - len(verified) - accepted == captured.total("moe.speculation.tokens", outcome="rejected")
    if noise == 0.02:
        assert 0 < accepted < sum(verified) - len(verified)
    assert (11, 20) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))
    # Verify passes are decode with their own sequence length, each with one duration.
    assert witness.routing(["prefill"] * 2 + ["decode"] * len(verified), dead=(0, 1)) == routing(captured)
    wanted = {("decode", str(length)): verified.count(length) for length in verified}
    assert {("prefill", "6"): 1, ("prefill", "4"): 1, **wanted} == durations(captured)


def test_a_verify_pass_is_not_charged_with_the_prompt(
    model: Any, captured: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's chunks and the first verify pass are done in one resumption, and share its time out."""
    plain = type(model).__call__

    def slow(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        time.sleep(0.5 if self is model and inputs.shape[1] == 10 else 0)
        return plain(self, inputs, cache)

    monkeypatch.setattr(type(model), "__call__", slow)
    draft = near(model, 0.0)
    next(generate.speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=3, num_draft_tokens=2))
    by_phase = {
        dict(labels)["phase"]: value.sum
        for (name, labels), value in captured.series().items()
        if name == "moe.forward.duration" and value.sum
    }
    assert by_phase["decode"] < 0.5 <= by_phase["prefill"]


def test_a_draft_model_is_not_recorded(model: Any, captured: Capture) -> None:
    """Its layers, of which it has more here, have neither calls nor series, though its class is the target's."""
    draft = tiny(seed=3, num_hidden_layers=5)
    tokens = generate.speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=4, num_draft_tokens=2)
    assert 4 == len(list(tokens))
    layers = {dict(labels)["layer"] for name, labels in captured.series() if name == "moe.layer.calls"}
    assert {"0", "1", "2"} == layers


def test_one_token_of_prompt(model: Any, captured: Capture) -> None:
    """A prompt of one token is read by the first verify pass alone."""
    tokens = generate.speculative_generate_step(
        mx.array(PROMPT[:1]), model, near(model, 1.0), max_tokens=3, num_draft_tokens=2
    )
    assert 3 == len(list(tokens))
    assert (1, 3) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))
    assert {"decode"} == {phase for phase, _ in durations(captured)}


def test_speculation_closed_among_accepted_drafts(model: Any, captured: Capture) -> None:
    """What became of drafts that nobody asked for any more is not known, and they are not rejected."""
    tokens = generate.speculative_generate_step(
        mx.array(PROMPT), model, near(model, 0.0), max_tokens=20, num_draft_tokens=4
    )
    assert [True, True] == [next(tokens)[2], next(tokens)[2]]
    tokens.close()
    assert 2 == captured.total("moe.speculation.tokens", outcome="accepted")
    assert 0 == captured.total("moe.speculation.tokens", outcome="rejected")
    assert 1 == seen(captured, REQUEST)[0]


def test_a_model_that_drafts_for_itself(model: Any, captured: Capture) -> None:
    """The same object as both cannot be told apart: a pass' phase follows from its length, outcomes are not guessed."""
    tokens = generate.speculative_generate_step(mx.array(PROMPT), model, model, max_tokens=4, num_draft_tokens=2)
    next(tokens)
    assert {} == captured.store.active
    assert 3 == len(list(tokens))
    assert 4 == captured.total("moe.tokens", phase="decode")
    assert {} == durations(captured)
    assert {"decode", "prefill"} == {phase for phase, _ in routing(captured)[0]}
    assert 0 == captured.total("moe.speculation.tokens")
    assert 1 == seen(captured, REQUEST)[0]


# -- what stays as it was -----------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda model: mlx_lm.generate(model, tokenizer(), PROMPT, max_tokens=12),
    "stream": lambda model: [
        (response.token, response.text, response.finish_reason)
        for response in mlx_lm.stream_generate(model, tokenizer(), PROMPT, max_tokens=12, prefill_step_size=4)
    ],
    "sampled": lambda model: [
        (token, logprobs.tolist()) for token, logprobs in steps(model, sampler=mx.random.categorical)
    ],
    "speculative": lambda model: [
        (response.token, response.from_draft)
        for response in mlx_lm.stream_generate(model, tokenizer(), PROMPT, max_tokens=12, draft_model=near(model, 0.02))
    ],
    "batch": lambda model: (
        mlx_lm.batch_generate(
            *(model, tokenizer(), [PROMPT, PROMPT[:5], PROMPT[3:]]),
            **{"max_tokens": [12, 3, 20], "prefill_step_size": 4, "return_token_ids": True},
        ).token_ids
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_output_is_the_same(model: Any, recorder: mt.Recorder, way: str) -> None:
    """Instrumented, on and off, and afterwards, a model says what it says without."""

    def outputs() -> Any:
        mx.random.seed(3)
        return WAYS[way](model)

    plain = outputs()
    integration.instrument(recorder=recorder)
    try:
        assert plain == outputs()
        with capture(recorder=recorder) as found:
            assert plain == outputs()
            assert found.total("moe.layer.calls") > 0
        assert plain == outputs()
    finally:
        integration.uninstrument()
    assert plain == outputs()


def test_compiled_parts_are_the_same(model: Any, recorder: mt.Recorder) -> None:
    """So it is where mlx_lm's fused functions are compiled."""
    mx.enable_compile()
    plain = WAYS["stream"](model)
    with capture(recorder=recorder) as found:
        integration.instrument(recorder=recorder)
        try:
            assert plain == WAYS["stream"](model)
        finally:
            integration.uninstrument()
        assert 0 == lost(found)


class Evaluations:
    """Counts what waits for the device or starts it, in all and inside a model's call."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.inside: list[str] = []
        self._depth = 0
        for owner, name in ((mx, "eval"), (mx, "async_eval"), (mx.array, "item"), (mx.array, "tolist")):
            patch.setattr(owner, name, self._counting(name, getattr(owner, name)))
        patch.setattr(type(model), "__call__", self._within(type(model).__call__))

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if self._depth:
                self.inside.append(name)
            return original(*args, **kwargs)

        return call

    def _within(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return call


def test_nothing_is_evaluated_for_it(model: Any, recorder: mt.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its begin to its end a pass has not one eval, item or tolist more than without telemetry."""

    def evaluations() -> tuple[list[str], list[str]]:
        with monkeypatch.context() as patch:
            counted = Evaluations(model, patch)
            tokens = steps(model, max_tokens=10, prefill_step_size=20)
            for _ in range(5):  # seven passes: the first reduction comes with the ninth
                next(tokens)
            return counted.calls, counted.inside

    plain = evaluations()
    assert "item" in plain[0]
    assert [] == plain[1]
    integration.instrument(recorder=recorder)
    try:
        with capture(recorder=recorder) as found:
            counted = evaluations()
            assert found.total("moe.tokens", phase="decode") == 5
    finally:
        integration.uninstrument()
    assert plain == counted


def test_the_generator_is_one(model: Any, captured: Capture) -> None:
    """It starts with the first value, can be closed twice, and passes on what is thrown into it."""
    tokens = steps(model)
    assert inspect.isgenerator(tokens)
    assert 0 == captured.total("moe.tokens")
    tokens.close()
    assert 0 == seen(captured, REQUEST)[0]  # nothing had begun
    tokens = steps(model)
    next(tokens)
    tokens.close()
    tokens.close()
    assert [] == list(tokens)
    tokens = steps(model)
    next(tokens)
    with pytest.raises(LookupError, match="thrown"):
        tokens.throw(LookupError("thrown"))
    assert 2 == seen(captured, REQUEST)[0]
    with pytest.raises(TypeError):
        generate.generate_step()
    with pytest.raises(ValueError, match="must be provided"):
        next(generate.generate_step(mx.array([], mx.uint32), model))
    assert 3 == seen(captured, REQUEST)[0]


def test_what_goes_into_a_generator(model: Any, recorder: mt.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever generate_step made of what is sent, thrown and closed, it makes now."""

    def answering(prompt: Any, model: Any) -> Any:
        got: list[object] = []
        try:
            while len(got) < 4:
                try:
                    got.append((yield len(got)))
                except LookupError as error:
                    got.append(error.args)
            return got
        finally:
            if len(got) < 4:
                raise ArithmeticError("closed")

    def conversation() -> list[object]:
        tokens = generate.generate_step(mx.array(PROMPT), model)
        found = [next(tokens), tokens.send("sent"), tokens.throw(LookupError("thrown")), next(tokens)]
        with pytest.raises(StopIteration) as stopped:
            next(tokens)
        other = generate.generate_step(mx.array(PROMPT), model)
        next(other)
        with pytest.raises(ArithmeticError):
            other.close()
        return [*found, stopped.value.value]

    monkeypatch.setattr(generate, "generate_step", answering)
    plain = conversation()
    assert [0, 1, 2, 3, ["sent", ("thrown",), None, None]] == plain
    with capture(recorder=recorder) as found:
        integration.instrument(recorder=recorder)
        assert plain == conversation()
        integration.uninstrument()
        assert 2 == seen(found, REQUEST)[0]


def test_a_generator_that_is_dropped(model: Any, captured: Capture) -> None:
    """Its request is recorded with the tokens that were taken, and it leaves no pass in progress."""
    tokens = steps(model)
    next(tokens), next(tokens)
    assert {} == captured.store.active
    del tokens
    gc.collect()
    assert 1 == seen(captured, REQUEST)[0]
    assert 2 == captured.total("moe.tokens", phase="decode")


def test_an_error_of_the_model_passes(model: Any, captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very exception arrives, the request is recorded as it stands, and the next generation is right again."""
    error = RuntimeError("out of memory")
    tokens = steps(model)
    next(tokens)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise error

        patch.setattr(type(model.layers[1]), "__call__", fail)
        with pytest.raises(RuntimeError) as raised:
            next(tokens)
        assert error is raised.value
        with pytest.raises(RuntimeError):
            next(steps(model))
    assert (2, 1) == (seen(captured, REQUEST)[0], seen(captured, TTFT)[0])
    assert {} == captured.store.active
    assert 11 == captured.total("moe.tokens", phase="prefill")
    before = captured.total("moe.telemetry.dropped")  # routing of the passes that failed was never computed
    assert 6 == len(list(steps(model)))
    assert 22 == captured.total("moe.tokens", phase="prefill")
    assert before == captured.total("moe.telemetry.dropped")


@pytest.mark.parametrize(
    "broken",
    [
        *("binding.Binding.knows", "binding.Binding.place", "binding.Binding.bind", "binding.Binding.tops"),
        *("passes.State.select", "passes.State.done", "passes.State.declare", "passes.State.know"),
        *("generation.Generation.begins", "generation.Generation.is_draft", "generation.Generation.resumed"),
        *("generation.Generation.yielded", "generation.Generation.returned", "generation.Generation.ended"),
        *("generation.Generation.__init__", "generation.Speculation.begins", "generation.Speculation._settle"),
        *("batches._Prompts.begins", "batches._Prompts.__init__", "batches._Step.begins", "batches._Step.returned"),
        *("batches._LastPromptTokens.begins", "batches.Batches._begin", "batches.Batches._follow"),
    ],
)
def test_errors_of_ours_stay_with_us(recorder: mt.Recorder, monkeypatch: Any, broken: str) -> None:
    """Whatever fails in the integration, a model says what it says, and the failure is counted."""
    model, draft = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1)
    prompt = mx.array(PROMPT)

    def outputs() -> list[Any]:
        found = [token for token, _ in steps(model, max_tokens=2)]
        speculated = generate.speculative_generate_step(prompt, model, draft, max_tokens=3)
        found += [token for token, _, _ in speculated]
        generator = generate.BatchGenerator(model)
        generator.insert([PROMPT], [2])
        while responses := generator.next_generated():
            found += [response.token for response in responses]
        generator.close()
        return found

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    plain = outputs()
    module, _, attribute = broken.partition(".")
    monkeypatch.setattr(f"moe_telemetry.integrations.mlx_lm.{module}.{attribute}", fail)
    with capture(recorder=recorder) as found:
        integration.instrument(recorder=recorder)
        try:
            assert plain == outputs()
        finally:
            integration.uninstrument()
        assert found.total("moe.telemetry.hook.errors") > 0


def test_a_pass_that_cannot_be_begun(model: Any, recorder: mt.Recorder, monkeypatch: Any) -> None:
    """Its phase is not known, and its routing counts nowhere; the passes before and behind it count as ever."""
    begins, begun = Generation.begins, []

    def fail_once(self: Any, *args: Any) -> Any:
        begun.append(args)
        if len(begun) == 6:
            raise RuntimeError("ours")
        return begins(self, *args)

    monkeypatch.setattr(Generation, "begins", fail_once)
    with capture(recorder=recorder) as found, Witness(model).watching() as witness:
        integration.instrument(recorder=recorder)
        list(steps(model))
        integration.uninstrument()
        wanted = witness.routing(["prefill"] * 4 + ["decode", "lost"] + ["decode"] * 4, dead=(0, 1, 2))
        assert [{key: count for key, count in each.items() if key[0] != "lost"} for each in wanted] == list(
            routing(found)
        )


def test_threads_that_generate_at_once(model: Any, captured: Capture) -> None:
    """Passes, tokens and requests of several threads are counted each in full."""
    models = [model, tiny(seed=1), tiny(seed=2)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: [token for token, _ in steps(each)], models))
    assert [6, 6, 6] == [len(tokens) for tokens in found]
    captured.store.drain_orphans()  # those threads have ended
    assert (33, 18) == (captured.total("moe.tokens", phase="prefill"), captured.total("moe.tokens", phase="decode"))
    assert 3 == seen(captured, REQUEST)[0]
    assert {("prefill", "4"): 6, ("prefill", "2"): 3, ("prefill", "1"): 3, ("decode", "1"): 15} == durations(captured)
    calls, _ = routing(captured)
    assert {"0": 18, "1": 18, "2": 18} == {layer: count for (phase, layer), count in calls.items() if phase == "decode"}


def test_telemetry_that_stops_in_the_middle(model: Any, recorder: mt.Recorder) -> None:
    """A generation goes on when telemetry ends, or the patches go, or it begins while one is under way."""
    plain = [token for token, _ in steps(model)]
    integration.instrument(recorder=recorder)
    late = steps(model)
    found = [next(late)[0]]
    with capture(recorder=recorder) as first:
        found += [token for token, _ in late]
        assert plain == found
        assert 0 == seen(first, REQUEST)[0]  # it is not known when it began
        early = steps(model)
        found = [next(early)[0]]
    found.append(next(early)[0])
    integration.uninstrument()
    assert plain == found + [token for token, _ in early]


def test_another_telemetry_in_the_middle_of_a_pass(model: Any, recorder: mt.Recorder, monkeypatch: Any) -> None:
    """The pass is done in the one that is on then, in its own phase."""
    integration.instrument(recorder=recorder)
    call, found = type(model.layers[1]).__call__, []
    with capture(recorder=recorder) as first, ExitStack() as later:
        tokens = steps(model)

        def changing(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if not found and x.shape[1] == 2:  # the third chunk's
                found.append(later.enter_context(capture(recorder=recorder)))
            return call(self, x, *args, **kwargs)

        monkeypatch.setattr(type(model.layers[1]), "__call__", changing)
        assert 6 == len(list(tokens))
        assert {("prefill", "4"): 2} == durations(first)
        assert {("prefill", "2"): 1, ("prefill", "1"): 1, ("decode", "1"): 5} == durations(found[0])
        assert {} == first.store.active == found[0].store.active
    integration.uninstrument()


def test_eos_is_a_token() -> None:
    """The tokenizer of these tests has an end token that models can say."""
    assert {EOS} == tokenizer(eos=True).eos_token_ids
