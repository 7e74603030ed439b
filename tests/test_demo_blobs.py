"""The demo's expert cache: complete or rebuilt, never half of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from moe_telemetry.demo import blobs
from moe_telemetry.demo.blobs import MANIFEST, blob_name, build, is_valid, layer_weights, open_blobs
from moe_telemetry.demo.config import ModelConfig
from moe_telemetry.demo.settings import DemoError

TINY = ModelConfig(layers=2, experts=4, top_k=1, width=8, hidden=8)


def silent(line: str) -> None:
    """No one listens to the build."""


def rebuilds(cache: Path) -> int:
    """Open the cache; how many lines about building were said."""
    said: list[str] = []
    with open_blobs(cache, TINY, 0, said.append):
        return len(said)


def truncate(folder: Path) -> None:
    """Cut a blob in the middle."""
    os.truncate(folder / blob_name(1), TINY.blob_bytes // 2)


def grow(folder: Path) -> None:
    """Append to a blob."""
    with (folder / blob_name(0)).open("ab") as file:
        file.write(b"x")


def flip_weight(folder: Path) -> None:
    """Change one byte of the weights, and no size."""
    data = bytearray((folder / blob_name(0)).read_bytes())
    data[100] ^= 1
    (folder / blob_name(0)).write_bytes(data)


def remove_manifest(folder: Path) -> None:
    """As if the build had been interrupted."""
    (folder / MANIFEST).unlink()


def cut_manifest(folder: Path) -> None:
    """Half of the manifest."""
    os.truncate(folder / MANIFEST, (folder / MANIFEST).stat().st_size // 2)


def flip_manifest(folder: Path) -> None:
    """A manifest that says another size than it was written with."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["blobs"][blob_name(0)]["crc32"] ^= 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


def empty_list_manifest(folder: Path) -> None:
    """JSON, but not a manifest."""
    (folder / MANIFEST).write_text("[]")


def remove_blob(folder: Path) -> None:
    """One layer is gone."""
    (folder / blob_name(0)).unlink()


@pytest.mark.parametrize(
    "damage",
    [truncate, grow, flip_weight, remove_manifest, cut_manifest, flip_manifest, empty_list_manifest, remove_blob],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Whatever is missing or changed, the next start builds the same weights again, and the one after does not."""
    folder = tmp_path / TINY.key(0)
    assert rebuilds(tmp_path) == 1
    assert rebuilds(tmp_path) == 0
    damage(folder)
    assert rebuilds(tmp_path) == 1
    assert rebuilds(tmp_path) == 0
    assert layer_weights(TINY, 0, 1).tobytes() == (folder / blob_name(1)).read_bytes()
    assert [folder] == list(tmp_path.iterdir())


def test_an_expert_lies_where_locate_says(tmp_path: Path) -> None:
    """Offset and length of an expert give its weights."""
    with open_blobs(tmp_path, TINY, 7, silent) as blobs:
        fd, offset = blobs.locate(1, 3)
        assert layer_weights(TINY, 7, 1)[3].tobytes() == os.pread(fd, TINY.expert_bytes, offset)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that fails midway removes what it wrote, and no cache appears."""

    def interrupted(config: ModelConfig, seed: int, layer: int) -> object:
        if layer == 1:
            raise KeyboardInterrupt
        return layer_weights(config, seed, layer)

    monkeypatch.setattr(blobs, "layer_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_blobs(tmp_path, TINY, 0, silent)
    assert list(tmp_path.iterdir()) == []


def test_builders_at_the_same_time_leave_one_valid_cache(tmp_path: Path) -> None:
    """Whoever comes second uses the first one's cache; nobody's open files break."""
    folder = tmp_path / TINY.key(0)
    folder.mkdir()
    together = threading.Barrier(4)
    failures: list[BaseException] = []

    def one() -> None:
        try:
            together.wait()
            build(folder, TINY, 0, silent)
            assert is_valid(folder, TINY)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [folder] == list(tmp_path.iterdir())


def test_leftovers_of_a_killed_build_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """The build folder of a process that is gone goes, the cache being whole or not; one at work stays."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    rebuilds(tmp_path)
    dead, alive = (tmp_path / f".{TINY.key(0)}.{pid}.x.tmp" for pid in (int(ended.stdout), os.getpid()))
    dead.mkdir()
    alive.mkdir()
    open_blobs(tmp_path, TINY, 0, silent).close()
    assert not dead.exists()
    assert alive.exists()


def test_an_unusable_cache_folder_is_one_line(tmp_path: Path) -> None:
    """A folder that cannot be made is a DemoError that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(DemoError) as error:
        open_blobs(tmp_path / "file" / "cache", TINY, 0, silent)
    assert str(tmp_path / "file" / "cache") in str(error.value)
    assert "\n" not in str(error.value)
