"""Replies that many share: fresh, made one at a time, and never a reason to wait for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_telemetry import rounds
from moe_telemetry.rounds import Rounds

TURN = 20.0


class Making:
    """A reply that takes until it is let go, once for each call."""

    def __init__(self) -> None:
        self.begun, self.leave = threading.Semaphore(0), threading.Semaphore(0)
        self.times = 0

    def __call__(self) -> int:
        self.begun.release()
        assert self.leave.acquire(timeout=TURN)
        self.times += 1
        return self.times


def asking(shared: Rounds[int], number: int) -> None:
    """Waits until so many wait for the round that is next."""
    deadline = time.monotonic() + TURN
    while shared._next.askers < number and time.monotonic() < deadline:
        time.sleep(0.005)
    assert number == shared._next.askers


def test_those_who_ask_meanwhile_share_the_next_round() -> None:
    """Fifty who ask while one reply is made cost one more, which was begun behind their question."""
    shared: Rounds[int] = Rounds()
    making = Making()
    with ThreadPoolExecutor(51) as pool:
        first = pool.submit(shared.ask, "a", making, TURN)
        assert making.begun.acquire(timeout=TURN)
        others = [pool.submit(shared.ask, "a", making, TURN) for _ in range(50)]
        asking(shared, 50)
        making.leave.release(2)
        assert 1 == first.result()
        assert {2} == {each.result() for each in others}
    assert 2 == making.times


def test_each_key_is_made_once_a_round() -> None:
    """Formats differ: those who share one get the same object, the others their own."""
    shared: Rounds[list[str]] = Rounds()
    blocking = Making()
    with ThreadPoolExecutor(10) as pool:
        pool.submit(shared.ask, "first", lambda: [str(blocking())], TURN)
        assert blocking.begun.acquire(timeout=TURN)
        asked = [pool.submit(shared.ask, key, lambda key=key: [key], TURN) for key in "aabbb"]
        asking(shared, 5)  # type: ignore[arg-type]
        blocking.leave.release()
        found = [each.result() for each in asked]
    assert [["a"], ["a"], ["b"], ["b"], ["b"]] == found
    assert 2 == len({id(reply) for reply in found})


def test_who_asks_alone_gets_a_new_reply_each_time() -> None:
    """Nothing is remembered: the second reply holds what came behind the first."""
    shared: Rounds[int] = Rounds()
    assert list(range(5)) == [shared.ask("a", lambda number=number: number, TURN) for number in range(5)]


def test_rounds_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight who ask without a pause, making replies takes its share of a processor behind the first few."""
    monkeypatch.setattr(rounds, "PER_ASKER", 0.0)
    shared: Rounds[None] = Rounds()
    spent: list[float] = []

    def make() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.01:
            pass
        spent.append(time.thread_time() - begin)

    begin = time.monotonic()

    def keep_asking() -> None:
        while time.monotonic() < begin + 1.0:
            shared.ask("a", make, TURN)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(keep_asking)
    took = time.monotonic() - begin
    assert 5 < len(spent)
    assert rounds.BURST + 2 * rounds.SHARE * took + 0.01 > sum(spent)


def test_who_asks_now_and_then_does_not_wait() -> None:
    """Five replies of some milliseconds, one behind the other, are made at once."""
    shared: Rounds[int] = Rounds()
    begin = time.monotonic()
    for number in range(5):
        assert number == shared.ask("a", lambda number=number: number, TURN)
    assert 0.0 == shared._rests_until or shared._rests_until <= time.monotonic()
    assert 1 > time.monotonic() - begin


def test_a_rest_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a reply has cost, the next is not put off for longer than a rest."""
    monkeypatch.setattr(rounds, "PER_ASKER", 0.0)
    monkeypatch.setattr(rounds, "SHARE", 0.001)
    monkeypatch.setattr(rounds, "BURST", 0.0)
    monkeypatch.setattr(rounds, "REST_MOST", 0.2)
    shared: Rounds[int] = Rounds()
    for number in range(3):
        begin = time.monotonic()
        shared.ask("a", lambda: sum(range(200_000)), TURN)
        took = time.monotonic() - begin
        assert number == 0 or took >= 0.19
        assert 2 > took


def test_behind_a_round_that_hangs_nobody_waits_for_ever() -> None:
    """Who asks meanwhile is told that its time is over, and the next round works once the first has ended."""
    shared: Rounds[int] = Rounds()
    making = Making()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shared.ask, "a", making, TURN)
        assert making.begun.acquire(timeout=TURN)
        with pytest.raises(TimeoutError):
            shared.ask("a", making, 0.05)
        making.leave.release(2)
        assert 1 == first.result()
    assert 2 == shared.ask("a", making, TURN)


def test_what_ends_a_thread_ends_its_round() -> None:
    """SystemExit of a collector passes in its own thread; the others who wait for the reply are told."""
    shared: Rounds[int] = Rounds()
    blocking = Making()

    def leave() -> int:
        raise SystemExit

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(shared.ask, "a", blocking, TURN)
        assert blocking.begun.acquire(timeout=TURN)
        asked = [pool.submit(shared.ask, "b", leave, TURN) for _ in range(2)]
        asking(shared, 2)
        blocking.leave.release()
        assert {SystemExit, TimeoutError} == {type(each.exception()) for each in asked}
        assert 1 == first.result()
    assert 7 == shared.ask("a", lambda: 7, TURN)
