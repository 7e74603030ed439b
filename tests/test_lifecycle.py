"""start() and stop(): ports, cycles, who feeds whom, lingering, what is left behind, and what names a run."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from conftest import fetch, free_port, keep_alive, raw, samples, scrape, total
from prometheus_client import CollectorRegistry, Counter

import moe_telemetry as mt
from moe_telemetry import ConfigurationError, recording
from moe_telemetry import telemetry as module
from moe_telemetry.endpoint import Endpoint
from moe_telemetry.testing import capture


def tokens(telemetry) -> float:
    return total(scrape(telemetry), "moe_tokens_total")


def python(code: str, timeout: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def descriptors() -> int:
    """Open file descriptors of this process, where the system tells."""
    folder = Path("/dev/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


# -- ports ----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_one_sentence_and_changes_nothing(start, recorder) -> None:
    """A second start on a taken port names port and remedy, and the first telemetry goes on recording."""
    first = start()
    threads = threading.active_count()
    with pytest.raises(ConfigurationError) as raised:
        mt.start(port=first.port, recorder=recorder)
    assert (
        f"cannot serve metrics on 127.0.0.1 port {first.port}: address already in use; choose another with port=, "
        "--port or OTEL_EXPORTER_PROMETHEUS_PORT (0 takes any free one)" == str(raised.value)
    )
    recorder.tokens(4)
    assert 4 == tokens(first)
    assert [first] == module._live
    assert threads == threading.active_count()


def test_port_zero_is_readable(start) -> None:
    """With port 0 the chosen port is in `port` and `url`, and answers."""
    telemetry = start(port=0)
    assert 0 < telemetry.port
    assert f"http://127.0.0.1:{telemetry.port}" == telemetry.url
    assert scrape(telemetry)


def test_ten_cycles_on_one_port_leave_nothing(recorder) -> None:
    """Ten starts and stops on one port, with a scrape and a kept connection each, leave no thread, socket or series."""
    port = free_port()

    def cycle() -> None:
        with mt.start(port=port, recorder=recorder, num_layers=2) as telemetry:
            recorder.tokens(1)
            assert 1 == tokens(telemetry)
            connections.append(keep_alive(telemetry))
        assert socket.socket().connect_ex(("127.0.0.1", port))

    connections: list = []
    cycle()
    before = (threading.active_count(), descriptors())
    for _ in range(10):
        cycle()
    for connection in connections:
        connection.close()
    gc.collect()
    after = (threading.active_count(), descriptors())
    assert before[0] == after[0], threading.enumerate()
    assert before[1] >= after[1]
    assert [] == module._live


def test_a_stopped_telemetry_can_be_collected(recorder) -> None:
    """Nothing keeps a stopped telemetry, its cells or its endpoint alive."""
    telemetry = mt.start(port=0, recorder=recorder)
    scrape(telemetry)
    gone = [weakref.ref(telemetry), weakref.ref(telemetry._source), weakref.ref(telemetry._endpoint)]
    telemetry.stop()
    mt.start(port=0, recorder=recorder).stop()  # the recorder keeps the cells that it fed last
    del telemetry
    deadline = time.monotonic() + 5
    while any(each() for each in gone) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert [None, None, None] == [each() for each in gone]


# -- one after the other and side by side ---------------------------------------------------------------------


def test_a_restart_begins_at_zero(start, recorder) -> None:
    """Start, record, stop, start, record: the scrape shows the second run alone, each name once."""
    first = start()
    recorder.tokens(1)
    first.stop()
    second = start()
    recorder.tokens(1)
    text = scrape(second)
    assert 1 == total(text, "moe_tokens_total")
    assert 1 == text.count("# TYPE moe_tokens_total counter\n")
    assert len(re.findall(r"^# TYPE (\S+)", text, re.M)) == len(set(re.findall(r"^# TYPE (\S+)", text, re.M)))


def test_one_registry_serves_a_restart(recorder) -> None:
    """A registry of the application's keeps its own metrics over a restart, and ours come and go with a run."""
    registry = CollectorRegistry()
    Counter("app_requests", "of the application", registry=registry).inc(3)
    for _ in range(3):
        with mt.start(port=0, recorder=recorder, registry=registry) as telemetry:
            recorder.tokens(2)
            text = scrape(telemetry)
            assert (3, 2) == (total(text, "app_requests_total"), total(text, "moe_tokens_total"))
    assert ["app_requests"] == [family.name for family in registry.collect()]


def test_two_telemetries_do_not_see_each_other(start) -> None:
    """Two telemetries with recorders and registries of their own each show what their recorder was told."""
    recorders = [mt.Recorder(), mt.Recorder()]
    running = [
        start(recorder=each, registry=CollectorRegistry(), model=f"model-{number}")
        for number, each in enumerate(recorders)
    ]
    recorders[0].tokens(10)
    recorders[1].tokens(200)
    assert [10, 200] == [tokens(each) for each in running]
    running[0].stop()
    recorders[0].tokens(10)
    recorders[1].tokens(1)
    assert 201 == tokens(running[1])
    assert 'model="model-1"' in scrape(running[1])
    assert 'model="model-0"' not in scrape(running[1])


def test_a_second_start_takes_the_recorder_over_and_gives_it_back(start, recorder) -> None:
    """A recorder feeds the telemetry started last, and the one before once that is stopped."""
    first = start()
    recorder.tokens(1)
    second = start()
    recorder.tokens(20)
    assert [1, 20] == [tokens(first), tokens(second)]
    second.stop()
    recorder.tokens(300)
    assert 301 == tokens(first)


def test_stopping_the_earlier_one_leaves_the_later_one_feeding(start, recorder) -> None:
    """The order of stops does not matter."""
    first, second = start(), start()
    first.stop()
    recorder.tokens(5)
    assert 5 == tokens(second)
    second.stop()
    assert mt.Recorder is type(recorder)


def test_starts_and_stops_in_many_threads(recorder) -> None:
    """Eight threads that start and stop at once leave the recorder off and nothing running."""
    errors = []

    def work() -> None:
        try:
            for _ in range(5):
                with mt.start(port=0, recorder=recorder):
                    recorder.tokens(1)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [] == errors
    assert ([], mt.Recorder) == (module._live, type(recorder))


def test_one_registry_for_one_telemetry_at_a_time(start, recorder) -> None:
    """A second start on a registry in use is refused and changes nothing; behind the stop it is free."""
    registry = CollectorRegistry()
    first = start(registry=registry)
    with pytest.raises(ConfigurationError, match="registry is used by a running telemetry"):
        mt.start(port=0, registry=registry, recorder=recorder)
    recorder.tokens(3)
    assert 3 == tokens(first)
    first.stop()
    assert 0 == tokens(start(registry=registry))


def test_a_recorder_of_a_class_of_its_own_is_refused(start, recorder) -> None:
    """A subclass of Recorder cannot be swapped: one clear error, nothing left behind."""

    class Own(mt.Recorder):
        pass

    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match=r"recorder must be a moe_telemetry\.Recorder, not its subclass Own"):
        mt.start(port=0, recorder=Own())
    with pytest.raises(ConfigurationError, match="not its subclass Own"), capture(recorder=Own()):
        pass
    assert (threads, []) == (threading.active_count(), module._live)


def test_a_start_that_fails_at_the_recorder_leaves_nothing(recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while the recorder is turned on frees the port, and nothing counts as running."""
    port = free_port()
    monkeypatch.setattr(recording, "attach", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mt.start(port=port, recorder=recorder)
    with pytest.raises(ConnectionRefusedError):
        raw(port, b"")
    assert ([], []) == (module._live, recording._feeds)
    assert "MOE_TELEMETRY_PARENT" not in os.environ


def test_a_stop_inside_a_capture_leaves_the_capture_recording(start, recorder) -> None:
    """start, capture, stop: the capture goes on, and behind it the recorder is off."""
    telemetry = start()
    with capture(recorder=recorder) as cap:
        telemetry.stop()
        recorder.tokens(3)
    assert 3 == cap.total("moe.tokens")
    assert mt.Recorder is type(recorder)


def test_a_start_inside_a_capture_outlives_it(start, recorder) -> None:
    """capture, start: the telemetry goes on recording when the block ends, and its stop turns the recorder off."""
    with capture(recorder=recorder) as cap:
        recorder.tokens(1)
        telemetry = start()
        recorder.tokens(20)
    recorder.tokens(300)
    assert (1, 320) == (cap.total("moe.tokens"), tokens(telemetry))
    telemetry.stop()
    assert mt.Recorder is type(recorder)


# -- stop -----------------------------------------------------------------------------------------------------


def test_stop_frees_the_port_and_turns_hooks_off(start, recorder) -> None:
    """Behind stop() the port refuses, hooks do nothing, and the figures are kept."""
    telemetry = start()
    recorder.tokens(3)
    telemetry.stop()
    recorder.tokens(4)
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")
    assert 3 == telemetry.snapshot()["metrics"]["moe.tokens"]["series"][1]["value"]


def test_stop_twice_and_from_another_thread(start, caplog: pytest.LogCaptureFixture) -> None:
    """A second stop, a stop in another thread and sixteen at once do nothing more, and log nothing."""
    telemetry = start()
    threads = [threading.Thread(target=telemetry.stop) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    telemetry.stop()
    telemetry.stop(linger=30)
    assert [] == caplog.records


def test_stop_in_a_signal_handler_during_stop(start) -> None:
    """A handler that stops while its thread is stopping returns at once."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("no interval timer on this system")
    telemetry = start()
    before = signal.signal(signal.SIGALRM, lambda *_: telemetry.stop())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.01)
        begin = time.monotonic()
        telemetry.stop(linger=0.5)
        assert 5 > time.monotonic() - begin
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_stop_while_being_scraped(start, recorder) -> None:
    """Scrapes that overlap stop() are whole or refused, never an error reply, and stop returns."""
    telemetry = start(num_layers=48)
    seen: list[int] = []
    ended = threading.Event()

    def scraping() -> None:
        while not ended.is_set():
            try:
                status, _, body = fetch(f"{telemetry.url}/metrics")
            except OSError:
                continue
            seen.append(status)
            assert b"moe_run_info" in body

    threads = [threading.Thread(target=scraping) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 4:
        time.sleep(0.01)
    begin = time.monotonic()
    telemetry.stop()
    assert 8 > time.monotonic() - begin
    ended.set()
    for thread in threads:
        thread.join(15)
    assert {200} == set(seen)


def test_an_exception_inside_stop_stays_there(start, caplog: pytest.LogCaptureFixture) -> None:
    """What fails while stopping is logged; the rest is stopped all the same."""
    telemetry = start()
    telemetry._undo.append(lambda: 1 / 0)
    telemetry.stop()
    assert "telemetry did not stop cleanly" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")


@pytest.mark.parametrize(
    ("linger", "error"),
    [
        ("5", TypeError),
        (None, TypeError),
        (-1, ConfigurationError),
        (float("nan"), ConfigurationError),
        (float("inf"), ConfigurationError),
    ],
)
def test_a_linger_that_is_none_changes_nothing(linger: object, error: type[Exception], start, recorder) -> None:
    """A linger that is no number of seconds is refused, telemetry goes on, and can be stopped."""
    telemetry = start()
    with pytest.raises(error, match="linger must be "):
        telemetry.stop(linger=linger)
    recorder.tokens(2)
    assert 2 == tokens(telemetry)
    telemetry.stop()
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")


def test_a_linger_that_is_interrupted_stops_all_the_same(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while stop() lingers frees port, threads and recorder, and goes on to the caller."""
    threads = threading.active_count()
    telemetry = start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Endpoint, "wait_for_scrape", interrupt)
    with pytest.raises(KeyboardInterrupt):
        telemetry.stop(linger=60)
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")
    assert (threads, [], mt.Recorder) == (threading.active_count(), module._live, type(recorder))


def test_an_interrupt_inside_stop_skips_nothing(start) -> None:
    """A step of stop() that is interrupted does not keep the others from being made."""
    telemetry = start()

    def interrupt() -> None:
        raise KeyboardInterrupt

    telemetry._undo.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        telemetry.stop()
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")


def test_an_interrupt_while_the_endpoint_closes_frees_the_port(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while stop() waits for the accepting thread still closes the listening socket."""
    telemetry = start()
    shutdown = telemetry._endpoint._server.shutdown

    def interrupt() -> None:
        shutdown()
        raise KeyboardInterrupt

    monkeypatch.setattr(telemetry._endpoint._server, "shutdown", interrupt)
    with pytest.raises(KeyboardInterrupt):
        telemetry.stop()
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")


def test_stop_in_a_connections_thread(start) -> None:
    """A finalizer that stops telemetry in the middle of its own scrape waits for nothing, and the scrape ends."""
    took: list[float] = []

    class Finalizer:
        def describe(self):
            return []

        def collect(self):
            begin = time.monotonic()
            telemetry.stop(linger=30)
            took.append(time.monotonic() - begin)
            return []

    registry = CollectorRegistry()
    registry.register(Finalizer())
    telemetry = start(registry=registry)
    assert scrape(telemetry)
    assert 2 > took[0]
    with pytest.raises(ConnectionRefusedError):
        raw(telemetry.port, b"")


def test_stop_in_the_accepting_thread(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that stops telemetry while it accepts a connection does not wait for itself."""
    telemetry = start()
    ended = threading.Event()
    admit = telemetry._endpoint._server._admit

    def stopping(connection) -> bool:
        telemetry.stop(linger=30)
        ended.set()
        return admit(connection)

    monkeypatch.setattr(telemetry._endpoint._server, "_admit", stopping)
    begin = time.monotonic()
    assert b"" == raw(telemetry.port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert ended.wait(1)
    assert 2 > time.monotonic() - begin
    telemetry._endpoint._thread.join(5)
    assert not telemetry._endpoint._thread.is_alive()


def test_stop_where_no_thread_can_be_started(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an interpreter ends no thread starts any more, and stop() does its work in the caller's."""
    registry = CollectorRegistry()
    telemetry = start(registry=registry)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    telemetry.stop()
    assert [] == list(registry.collect())


def test_the_context_manager_stops_on_an_error(recorder) -> None:
    """A with-block that raises stops the telemetry and lets the error through."""
    with pytest.raises(KeyError, match="mine"), mt.start(port=0, recorder=recorder):
        raise KeyError("mine")
    assert mt.Recorder is type(recorder)


def test_linger_ends_with_a_scrape_that_has_the_final_totals(start, recorder) -> None:
    """stop(linger) serves until one scrape, which shows the last event; hooks are off meanwhile."""
    telemetry = start()
    recorder.tokens(41)
    stopping = threading.Thread(target=telemetry.stop, args=(30,))
    begin = time.monotonic()
    stopping.start()
    time.sleep(0.2)
    recorder.tokens(1_000)
    assert 200 == fetch(f"{telemetry.url}/-/healthy")[0]
    assert stopping.is_alive()
    assert 41 == tokens(telemetry)
    stopping.join(10)
    assert not stopping.is_alive()
    assert 10 > time.monotonic() - begin


def test_linger_ends_at_its_deadline(start) -> None:
    """Without a scrape, and with a HEAD, stop(linger) takes as long as it was told."""
    telemetry = start()
    begin = time.monotonic()
    stopping = threading.Thread(target=telemetry.stop, args=(0.6,))
    stopping.start()
    raw(telemetry.port, b"HEAD /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
    stopping.join(10)
    assert 0.6 <= time.monotonic() - begin < 4


def test_linger_waits_for_a_scrape_that_began_behind_it(start, recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in progress when stop(linger) is called does not end it: it may lack the last events."""
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        def describe(self):
            return []

        def collect(self):
            entered.set()
            leave.wait(10)
            return []

    registry = CollectorRegistry()
    registry.register(Slow())
    telemetry = start(registry=registry)
    early = threading.Thread(target=scrape, args=(telemetry,))
    early.start()
    assert entered.wait(10)
    recorder.tokens(9)
    stopping = threading.Thread(target=telemetry.stop, args=(30,))
    stopping.start()
    time.sleep(0.1)
    leave.set()
    early.join(10)
    time.sleep(0.2)
    assert stopping.is_alive()
    assert 9 == tokens(telemetry)
    stopping.join(10)
    assert not stopping.is_alive()


def test_the_last_scrape_is_sent_whole_before_the_process_ends(tmp_path: Path) -> None:
    """A process that ends behind stop(linger) has sent the scrape that ended it to its last byte."""
    code = (
        "import moe_telemetry as mt, sys\n"
        "tel = mt.start(port=0, num_layers=200)\n"
        "mt.recorder.tokens(77)\n"
        "print(tel.port, flush=True)\n"
        "tel.stop(linger=20)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port), 10) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            time.sleep(0.5)
            received = b""
            while part := slow.recv(65_536):
                received += part
        head, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        assert int(length[1]) == len(body)
        assert 77 == total(body.decode(), "moe_tokens_total")
        assert 0 == process.wait(20)


def test_a_process_that_ends_without_stop_is_stopped_at_exit() -> None:
    """Leaving without stop() ends at once, without a message."""
    begin = time.monotonic()
    done = python("import moe_telemetry as mt\ntel = mt.start(port=0)\nmt.recorder.tokens(1)")
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    assert 15 > time.monotonic() - begin


def test_exit_stops_what_runs(recorder) -> None:
    """The exit handler stops every telemetry, the latest first, and leaves a stopped one alone."""
    running = [mt.start(port=0, recorder=recorder) for _ in range(3)]
    running[1].stop()
    module._stop_all()
    assert ([], mt.Recorder) == (module._live, type(recorder))


def test_a_stop_that_raises_at_exit_does_not_keep_others_from_stopping(recorder) -> None:
    """A failure of one telemetry at exit is logged, and the others are stopped."""
    first, second = (mt.start(port=0, recorder=recorder) for _ in range(2))
    second._undo.append(lambda: 1 / 0)
    module._stop_all()
    for each in (first, second):
        with pytest.raises(ConnectionRefusedError):
            raw(each.port, b"")


def test_disabled_does_nothing(monkeypatch: pytest.MonkeyPatch, recorder) -> None:
    """Under OTEL_SDK_DISABLED=true there is no endpoint, hooks stay off, and everything can be called."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    threads = threading.active_count()
    with mt.start(recorder=recorder) as telemetry:
        assert (None, None) == (telemetry.url, telemetry.port)
        assert mt.Recorder is type(recorder)
        assert "moe.tokens" not in telemetry.snapshot()["metrics"]
    telemetry.stop(linger=30)
    assert threads == threading.active_count()


def test_a_start_that_fails_late_leaves_nothing(recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure behind the bound port frees the port, the registry and the threads, and hooks stay as they were."""
    registry = CollectorRegistry()
    port = free_port()

    def fail(*_: object) -> None:
        raise RuntimeError("late")

    threads = threading.active_count()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(Endpoint, "serve", fail)
    with pytest.raises(RuntimeError, match="late"):
        mt.start(port=port, registry=registry, recorder=recorder, otlp=True)
    assert [] == list(registry.collect())
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)  # the exporter's thread notices its end between two attempts
    assert (threads, mt.Recorder) == (threading.active_count(), type(recorder))
    monkeypatch.undo()
    mt.start(port=port, registry=registry, recorder=recorder).stop()


def test_the_package_lists_what_it_loads_late() -> None:
    """dir() of the package names start and Telemetry, and not what warns a spawned child."""
    assert {"start", "Telemetry", "report", "recorder"} <= set(dir(mt))
    assert not hasattr(mt, "warn_if_spawned")


# -- identity -------------------------------------------------------------------------------------------------


def info(text: str, name: str) -> dict[str, str]:
    (labels,) = [dict(labels) for found, labels in samples(text) if found == name]
    return labels


def test_each_start_is_a_run_of_its_own(start) -> None:
    """The run's label is the given name with the start time, and differs from start to start."""
    runs = []
    for _ in range(5):
        telemetry = start(run="night")
        runs.append(info(scrape(telemetry), "moe_run_info")["run"])
        telemetry.stop()
    assert 5 == len(set(runs))
    assert all(re.fullmatch(r"night \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", run) for run in runs)


def test_the_instance_is_the_same_over_restarts(start) -> None:
    """service.instance.id depends on host and port alone."""
    port = free_port()
    found = []
    for _ in range(2):
        telemetry = start(port=port)
        found.append(info(scrape(telemetry), "target_info"))
        telemetry.stop()
    assert found[0] == found[1]
    assert found[0]["service_instance_id"] != info(scrape(start()), "target_info")["service_instance_id"]


def test_resource_attributes_of_the_environment_win(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name and instance id given by the environment are kept."""
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,service.name=server,host.name=h,my.secret=x"
    )
    assert {"service_instance_id": "mine", "service_name": "server", "host_name": "h"} == info(
        scrape(start()), "target_info"
    )


def test_a_similar_attribute_is_not_taken_for_the_instance_id(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute whose name contains service.instance.id leaves ours in place."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "x.service.instance.ids=1")
    assert 36 == len(info(scrape(start()), "target_info")["service_instance_id"])


def test_target_info_shows_what_is_allowed_and_no_command_line(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every resource detector on, target_info has the allowed keys only."""
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "*")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "moe\udcff")
    text = scrape(start())
    found = info(text, "target_info")
    assert (
        {"service_name", "service_instance_id"}
        <= set(found)
        <= {
            "service_name",
            "service_namespace",
            "service_instance_id",
            "service_version",
            "deployment_environment_name",
            "deployment_environment",
            "host_name",
        }
    )
    assert "moe?" == found["service_name"]
    assert "process_command" not in text
    assert "telemetry_sdk" not in text


def test_the_runtime_names_the_service(start) -> None:
    """Without a name from the environment the service is called like the runtime."""
    assert "my-rt" == info(scrape(start(runtime="my-rt")), "target_info")["service_name"]


def test_no_series_of_the_sdks_own_making(start, recorder) -> None:
    """No scope label and no overflow series appears, with three hundred layers neither."""
    telemetry = start(num_layers=300)
    recorder.forward(1)
    for layer in range(300):
        recorder.routed(layer, {1, 2}, resident={1})
    text = scrape(telemetry)
    for unwanted in ("otel_metric_overflow", "otel_scope", "_created", "target_target"):
        assert unwanted not in text
    assert 257 == len({labels for name, labels in samples(text) if name == "moe_layer_experts_total"}) / 2


def test_a_pass_cut_off_by_stop_does_not_age() -> None:
    """After stop() no forward pass is in progress."""
    recorder = mt.Recorder()
    telemetry = mt.start(port=0, recorder=recorder)
    recorder.forward(1)
    recorder.forward_done(0.1)
    recorder.forward(1)
    telemetry.stop()
    ages = [series["value"] for series in telemetry.snapshot()["metrics"]["moe.forward.active"]["series"]]
    assert [0.0, 0.0] == ages
