"""Where the host's time goes when routing is recorded, token by token: what routing_gpu.py measures as a whole.

On a machine whose speed drifts, a cost of one per cent is found between neighbours: each second token pays for one
part of the way, and the difference to the tokens beside it counts. A batch, which comes every sixteenth token, is
measured against the tokens around it. A prefill runs with and without in turn. Model and options are routing_gpu.py's.

    python benchmarks/routing_cost.py [--seconds 60] [--layers 48] [--quantize]
    python benchmarks/routing_cost.py --tiny --seconds 4     # does it run; its figures say nothing
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import routing_gpu
import routing_turns
from mlx.nn.layers.base import Module
from routing_ways import Recording, build, on_gpu

from moe_telemetry import adding, passes, pending, recorder, recording, reduction, reuse, routing, tallies
from moe_telemetry.integrations.mlx_lm import passes as integration
from moe_telemetry.live import routed_pass

BLOCKS = 20
"""Pieces of a series whose means tell how far its mean is known."""
BEFORE, BEHIND = range(-6, -1), range(5, 9)
"""Tokens around one that begins a batch, to which it and those between are compared."""
TIMED: tuple[tuple[Any, str], ...] = (
    *((routing.Router, name) for name in ("take_pass", "_launch", "_read", "drain")),
    *((reduction.Batch, "__init__"), (adding, "add_passes"), (mx, "async_eval")),
    *(
        (pending.Pending, "add"),
        (passes.Pass, "uniform"),
        (integration.State, "_hand_over"),
        (integration.State, "_pack"),
        (adding.Packing, "__call__"),
    ),
    *((tallies.Tally, "count"), (passes.HostPasses, "count"), (reuse.Feed, "hand_over")),
)


def nothing(*_: object) -> None:
    """In the place of what is not to be done."""


def dropping(router: Any) -> None:
    """In the place of `Router._launch`: what is kept goes uncounted."""
    router._closed, router._ids = [], 0


def tokens(model: Module, seconds: float, before: Callable[[int], None]) -> list[float]:
    """Seconds of each token of a generation; `before` is called with its number ahead of each."""
    steps = routing_turns.generation.generate_step(routing_turns.prompt(model), model, max_tokens=-1)
    taken: list[float] = []
    for _ in range(4):
        next(steps)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before(len(taken))
        begin = time.perf_counter()
        next(steps)
        taken.append(time.perf_counter() - begin)
    steps.close()
    return taken


def known(values: list[float]) -> tuple[float, float]:
    """Mean without the outer tenths, and its 95 % interval's half width, from the means of consecutive pieces."""
    size = max(1, len(values) // BLOCKS)
    means = [_trimmed(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    spread = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")
    return _trimmed(values), 1.96 * spread


def _trimmed(values: list[float]) -> float:
    ordered = sorted(values)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def differences(taken: list[float]) -> list[float]:
    """What each odd token took more than the mean of the two beside it."""
    return [taken[at] - (taken[at - 1] + taken[at + 1]) / 2 for at in range(1, len(taken) - 1, 2)]


def telling(label: str, taken: list[float]) -> float:
    """Print what odd tokens cost more, and give it back as seconds a token."""
    mean, error = known(differences(taken))
    of = statistics.median(taken[::2])
    print(
        f"| {label} | {mean * 1e6:.0f} ± {error * 1e6:.0f} | {mean / of:.2%} ± {error / of:.2%} | {len(taken)} |",
        flush=True,
    )
    return mean / of


@contextmanager
def timing() -> Iterator[dict[str, list[float]]]:
    """Seconds that the calls of TIMED take, by name, those of what they call included."""
    found: dict[str, list[float]] = defaultdict(list)
    originals = [(owner, name, getattr(owner, name)) for owner, name in TIMED]

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found[label].append(time.perf_counter() - begin)

        return call

    for owner, name, original in originals:
        setattr(owner, name, timed(f"{owner.__name__.rpartition('.')[2]}.{name}", original))
    try:
        yield found
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def decode(model: Module, seconds: float) -> float:
    """The costs of a token, as shares of one that is not recorded; their sum."""
    store, taking, launching = recorder._store, routed_pass, routing.Router._launch

    def recorded(number: int) -> None:
        if number % 2:
            recording.attach(recorder, store)
        else:
            recording.detach(recorder)

    def taken(number: int) -> None:
        setattr(integration, "routed_pass", taking if number % 2 else nothing)  # noqa: B010

    setattr(integration, "routed_pass", nothing)  # noqa: B010
    total = telling("the pass and its layers seen", tokens(model, seconds * 0.3, recorded))
    recording.attach(recorder, store)
    setattr(routing.Router, "_launch", dropping)  # noqa: B010
    total += telling("its routing kept", tokens(model, seconds * 0.2, taken))
    setattr(integration, "routed_pass", taking)  # noqa: B010
    began: list[int] = []

    def launch(router: routing.Router) -> None:
        began.append(number[0])
        launching(router)

    number = [0]
    setattr(routing.Router, "_launch", launch)  # noqa: B010
    with timing() as found:
        each = tokens(model, seconds * 0.5, lambda at: number.__setitem__(0, at))
    setattr(routing.Router, "_launch", launching)  # noqa: B010
    extra = []
    for at in began:
        if -BEFORE[0] <= at < len(each) - BEHIND[-1]:
            usual = statistics.median(each[at + step] for step in (*BEFORE, *BEHIND))
            extra.append(sum(each[at + step] - usual for step in range(-1, BEHIND[0])))
    mean, error = known(extra)
    share = statistics.median(each) * routing.FORWARDS
    print(
        f"| a batch, a sixteenth of it | {mean / routing.FORWARDS * 1e6:.0f} ± {error / routing.FORWARDS * 1e6:.0f} "
        f"| {mean / share:.2%} ± {error / share:.2%} | {len(each)} |"
    )
    show(found)
    return total + mean / share


def show(found: dict[str, list[float]]) -> None:
    """Median and number of calls of what was timed."""
    for name, values in found.items():
        print(f"    {name:24} {len(values):6} calls, median {statistics.median(values) * 1e6:8.0f} us", flush=True)


def prefill(model: Module, length: int, repeats: int) -> None:
    """A prompt read with and without recording, in turn: seconds to the first token, and what took them."""
    prompt = mx.random.randint(0, model.args.vocab_size, (length,), key=mx.random.key(1))
    mx.eval(prompt)
    store = recorder._store
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with timing() as found:
        for number in range(2 * repeats + 2):
            on = bool(number % 2)
            if on:
                recording.attach(recorder, store)
            else:
                recording.detach(recorder)
            begin = time.perf_counter()
            for _ in routing_turns.generation.generate_step(prompt, model, max_tokens=1):
                pass
            mx.synchronize(routing_turns.generation.generation_stream)
            if number > 1:
                seconds[on].append(time.perf_counter() - begin)
    off, this = (statistics.median(seconds[on]) for on in (False, True))
    print(f"prefill of {length}: {off * 1e3:.1f} ms, recorded {this * 1e3:.1f} ms, {off / this:.3f} of the speed")
    show(found)


def main() -> int:
    """Build, measure, print."""
    options = routing_gpu.arguments()
    model = build(options)
    print(f"{'GPU' if on_gpu() else 'CPU'}, {options.layers} layers of {options.experts} experts, top-{options.top_k}")
    tokens(model, options.seconds / 10, nothing)
    with Recording(model)():
        print("| part | us a token | share of a token | tokens |\n|---|---|---|---|")
        total = decode(model, options.seconds)
        print(f"decode keeps {1 / (1 + total):.3f} of the speed")
        prefill(model, options.prompt, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
