"""Forked and spawned children: never a silent loss, a hang or a wrong figure, and the port is the parent's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import free_port

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

LINE = "moe_telemetry: hooks are off in this forked process; call start() in it to record here too\n"
TIMEOUT = 60

PRELUDE = """
import faulthandler, os, signal, sys, threading, time, urllib.request

# Stacks, then the end, of a process that hangs. Not faulthandler's watchdog: a forked child waits for it for ever.
faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
signal.alarm(40)
os.register_at_fork(after_in_child=lambda: signal.alarm(10))

import moe_telemetry as mt
rec = mt.recorder

def work():
    rec.forward(1)
    for _ in range(1000):
        rec.routed(0, {1, 2}, resident={1})
        rec.tokens(1)
    rec.forward_done(0.01)

def scrape(tel):
    return urllib.request.urlopen(tel.url + "/metrics", timeout=20).read().decode()

def value(tel, line):
    return [float(each.rsplit(" ", 1)[1]) for each in scrape(tel).splitlines() if each.startswith(line)]

def reap(pid):
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

TOKENS = 'moe_tokens_total{phase="decode"}'
"""


def program(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs `body` behind PRELUDE as a program of its own; one that hangs fails with its threads' stacks."""
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert 0 == done.returncode, done.stderr + done.stdout
    return done


def test_forked_children_are_no_ops_with_one_line_each(tmp_path: Path) -> None:
    """Two children of one fork each record 1,000: one line each, and the parent's total is its own."""
    done = program(
        tmp_path,
        """
        tel = mt.start(port=0)
        work()
        for _ in range(2):
            pid = os.fork()
            if not pid:
                work()
                assert type(rec) is mt.Recorder
                os._exit(0)
            assert 0 == reap(pid)
        work()
        assert [2000.0] == value(tel, TOKENS), value(tel, TOKENS)
        tel.stop()
        """,
    )
    assert 2 * LINE == done.stderr


def test_a_grandchild_is_silent(tmp_path: Path) -> None:
    """The child of a child that was told already is not told again."""
    done = program(
        tmp_path,
        """
        tel = mt.start(port=0)
        pid = os.fork()
        if not pid:
            grandchild = os.fork()
            if not grandchild:
                work()
                os._exit(0)
            os._exit(reap(grandchild))
        assert 0 == reap(pid)
        """,
    )
    assert LINE == done.stderr


def test_a_fork_without_telemetry_says_nothing(tmp_path: Path) -> None:
    """Before start() and after stop() a fork is nobody's business."""
    done = program(
        tmp_path,
        """
        for _ in range(2):
            pid = os.fork()
            if not pid:
                work()
                os._exit(0)
            assert 0 == reap(pid)
            mt.start(port=0).stop()
        """,
    )
    assert "" == done.stderr


def test_children_of_a_parent_that_is_scraped_and_recording(tmp_path: Path) -> None:
    """Forty forks amid scrapes, hooks and snapshots: no child hangs in anything it calls, the parent stays exact."""
    done = program(
        tmp_path,
        """
        from prometheus_client import CollectorRegistry
        registry = CollectorRegistry()
        tel = mt.start(port=0, num_layers=24, registry=registry)
        ended = threading.Event()
        counted = [0]

        def scraping():
            while not ended.is_set():
                scrape(tel)

        def recording():
            while not ended.is_set():
                rec.tokens(1)
                counted[0] += 1

        def restarting():
            other = mt.Recorder()
            while not ended.is_set():
                mt.start(port=0, recorder=other).stop()

        targets = (scraping, scraping, recording, restarting)
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        for number in range(40):
            pid = os.fork()
            if not pid:
                work()
                assert tel.snapshot()["metrics"]["moe.tokens"]
                assert not list(registry.collect())
                tel.stop()
                tel.stop(linger=5)
                if number % 4 == 0:
                    with mt.start(port=0) as own:
                        work()
                        assert [1000.0] == value(own, TOKENS)
                if number % 2:
                    os._exit(0)
                sys.exit(0)  # the interpreter's whole way out
            assert 0 == reap(pid), number
        ended.set()
        for thread in threads:
            thread.join()
        assert [float(counted[0])] == value(tel, TOKENS), (counted, value(tel, TOKENS))
        tel.stop()
        """,
    )
    assert done.stderr.count(LINE) >= 40
    assert "" == done.stderr.replace(LINE, "")


def test_a_child_starts_its_own(tmp_path: Path) -> None:
    """A child may start() on another port; both then show their own figures, and the run is another."""
    program(
        tmp_path,
        """
        tel = mt.start(port=0)
        work()
        pid = os.fork()
        if not pid:
            with mt.start(port=0) as own:
                work()
                assert own.port != tel.port
                assert [1000.0] == value(own, TOKENS)
                assert own.snapshot()["run"]["run"] != tel.snapshot()["run"]["run"]
            os._exit(0)
        assert 0 == reap(pid)
        assert [1000.0] == value(tel, TOKENS)
        """,
    )


def test_a_child_inherits_neither_feed_nor_registry(tmp_path: Path) -> None:
    """In a child nothing is fed any more, by a capture in the parent neither, and the parent's registry is free."""
    program(
        tmp_path,
        """
        from prometheus_client import CollectorRegistry
        from moe_telemetry import recording
        from moe_telemetry.testing import capture
        registry = CollectorRegistry()
        tel = mt.start(port=0, registry=registry)
        with capture() as cap:
            pid = os.fork()
            if not pid:
                assert [] == recording._feeds
                work()
                assert 0 == cap.total("moe.tokens")
                with mt.start(port=0, registry=registry) as own:
                    work()
                    assert [1000.0] == value(own, TOKENS)
                assert type(rec) is mt.Recorder
                os._exit(0)
            assert 0 == reap(pid)
            work()
        assert 1000 == cap.total("moe.tokens")
        tel.stop()
        """,
    )


def test_a_fork_while_another_thread_switches_recorders(tmp_path: Path) -> None:
    """Locks of the recorders that another thread holds at the fork hang no child, and no capture in it."""
    program(
        tmp_path,
        """
        from moe_telemetry import recording
        from moe_telemetry.testing import capture
        held, leave = threading.Event(), threading.Event()

        def hold():
            with recording._feeding, recording._lock:
                held.set()
                leave.wait(30)

        for run in range(2):
            tel = mt.start(port=0) if run else None
            held.clear(), leave.clear()
            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            pid = os.fork()
            if not pid:
                with capture(locked=True) as cap:
                    work()
                assert 1000 == cap.total("moe.tokens")
                os._exit(0)
            assert 0 == reap(pid)
            leave.set()
            holder.join()
        tel.stop()
        """,
    )


def test_the_port_is_free_while_a_child_lives_on(tmp_path: Path) -> None:
    """When the parent has stopped and ended, its port can be bound and its clients see the end, child or no child."""
    port = free_port()
    script = tmp_path / "parent.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent(
            f"""
            import http.client
            tel = mt.start(port={port})
            kept = http.client.HTTPConnection("127.0.0.1", {port}, timeout=20)
            kept.request("GET", "/metrics")
            kept.getresponse().read()
            pid = os.fork()
            if not pid:
                os.close(1)
                time.sleep(30)
                os._exit(0)
            tel.stop()
            kept.sock.settimeout(5)
            assert b"" == kept.sock.recv(1)
            mt.start(port={port}).stop()
            print(pid, flush=True)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert 0 == done.returncode
    child = int(done.stdout)
    try:
        os.kill(child, 0)
        import moe_telemetry as mt

        mt.start(port=port, recorder=mt.Recorder()).stop()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_while_lingering_frees_the_port(tmp_path: Path) -> None:
    """A child forked while the parent lingers does not keep the port, and says nothing: hooks were off."""
    done = program(
        tmp_path,
        """
        tel = mt.start(port=0)
        stopping = threading.Thread(target=tel.stop, args=(1.0,))
        stopping.start()
        time.sleep(0.3)
        pid = os.fork()
        if not pid:
            tel.stop()
            time.sleep(3)
            os._exit(0)
        stopping.join()
        mt.start(port=tel.port).stop()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        """,
    )
    assert "" == done.stderr


def test_otlp_is_the_parents(tmp_path: Path) -> None:
    """A child does not push the parent's figures a second time, whatever it does to end."""
    program(
        tmp_path,
        """
        from http.server import BaseHTTPRequestHandler, HTTPServer
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        import gzip
        seen = []

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                seen.append(self.headers["User-Agent"])
                self.send_response(200)
                self.end_headers()
            def log_message(self, *args):
                pass

        server = HTTPServer(("127.0.0.1", 0), Receiver)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        tel = mt.start(port=0, otlp=True)
        pid = os.fork()
        if not pid:
            for reader in tel._readers:
                reader.force_flush()
            tel.stop()
            sys.exit(0)
        assert 0 == reap(pid)
        assert [] == seen
        tel.stop()
        assert 1 == len(seen)
        """,
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_children(method: str, tmp_path: Path) -> None:
    """Workers of multiprocessing are no-ops, each with one line, and the parent's figures stay its own."""
    done = program(
        tmp_path,
        f"""
        import multiprocessing

        def child():
            work()
            assert type(rec) is mt.Recorder

        if __name__ == "__main__":
            tel = mt.start(port=0)
            work()
            context = multiprocessing.get_context({method!r})
            for _ in range(2):
                process = context.Process(target=child)
                process.start()
                process.join(30)
                assert 0 == process.exitcode, process.exitcode
            assert [1000.0] == value(tel, TOKENS)
            tel.stop()
        """,
    )
    assert 2 == len(re.findall("hooks are off in this", done.stderr)), done.stderr


def test_a_program_that_is_no_worker_is_silent(tmp_path: Path) -> None:
    """A program started by subprocess is told nothing, though it inherits the environment."""
    done = program(
        tmp_path,
        """
        import subprocess
        tel = mt.start(port=0)
        code = "import moe_telemetry as mt; mt.recorder.tokens(1)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (0, "", "") == (done.returncode, done.stdout, done.stderr), done
        """,
    )
    assert "" == done.stderr
