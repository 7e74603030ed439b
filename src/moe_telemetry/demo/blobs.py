"""The expert weights on disk: built once per configuration and seed, checked at every start, then only read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from .config import FORMAT_VERSION, ModelConfig
from .settings import DemoError

MANIFEST = "manifest.json"

_CHECK_BLOCK = 1 << 22


def blob_name(layer: int) -> str:
    """The file of one layer's experts."""
    return f"layer-{layer:02d}.bin"


def layer_weights(config: ModelConfig, seed: int, layer: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """All experts of a layer, (experts, elements of one expert): ``w_in`` then ``w_out``, as `ModelConfig` says."""
    random = np.random.default_rng([seed, FORMAT_VERSION, layer])
    size = config.w_in_size
    flat = random.standard_normal((config.experts, size + config.w_out_size), dtype=np.float32)
    flat[:, :size] *= config.width**-0.5
    flat[:, size:] *= config.residual_scale * config.hidden**-0.5
    return flat


class ExpertBlobs:
    """Open blobs of a valid cache: file descriptors and offsets."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._expert_bytes = config.expert_bytes
        self._fds: list[int] = []
        try:
            for layer in range(config.layers):
                self._fds.append(os.open(folder / blob_name(layer), os.O_RDONLY))
        except OSError:
            self.close()
            raise

    def locate(self, layer: int, expert: int) -> tuple[int, int]:
        """File descriptor and byte offset of an expert."""
        return self._fds[layer], expert * self._expert_bytes

    def close(self) -> None:
        """Close the files; again is harmless."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> ExpertBlobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_blobs(cache_dir: Path, config: ModelConfig, seed: int, on_build: Callable[[str], None]) -> ExpertBlobs:
    """The experts of `config` and `seed`, built into `cache_dir` first where no valid cache is there."""
    folder = cache_dir / config.key(seed)
    try:
        _remove_stale_builds(folder)
        if not is_valid(folder, config):
            build(folder, config, seed, on_build)
        return ExpertBlobs(folder, config)
    except OSError as error:
        where = error.filename or folder
        raise DemoError(f"cannot use the cache folder {cache_dir}: {error.strerror or error} ({where})") from error


def is_valid(folder: Path, config: ModelConfig) -> bool:
    """Whether `folder` holds a complete cache: the manifest is whole and every blob has its size and checksum."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        body = manifest["blobs"]
        if manifest["checksum"] != _manifest_checksum(body) or len(body) != config.layers:
            return False
        for layer in range(config.layers):
            path = folder / blob_name(layer)
            said = body[path.name]
            if path.stat().st_size != said["bytes"] or said["bytes"] != config.blob_bytes:
                return False
        return all(_crc_of_file(folder / name) == said["crc32"] for name, said in body.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build(folder: Path, config: ModelConfig, seed: int, on_build: Callable[[str], None]) -> None:
    """Write the cache beside its place and move it there, so that nobody ever sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{os.getpid()}.", suffix=".tmp", dir=folder.parent))
    on_build(f"Writing {config.total_bytes / 1e6:.0f} MB of expert weights to {folder}, once")
    try:
        body: dict[str, dict[str, int]] = {}
        for layer in range(config.layers):
            data = layer_weights(config, seed, layer).data.cast("B")
            (temporary / blob_name(layer)).write_bytes(data)
            body[blob_name(layer)] = {"bytes": data.nbytes, "crc32": zlib.crc32(data)}
        manifest = {"format": FORMAT_VERSION, "blobs": body, "checksum": _manifest_checksum(body)}
        unfinished = temporary / (MANIFEST + ".part")
        unfinished.write_text(json.dumps(manifest, indent=1))
        unfinished.rename(temporary / MANIFEST)
        _move_into_place(temporary, folder, config)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, folder: Path, config: ModelConfig) -> None:
    """Rename the finished build to `folder`; another process' valid build is as good and stays."""
    for _ in range(3):
        try:
            temporary.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if is_valid(folder, config):
            return
        # A broken cache is renamed away first: a process that still reads it keeps its open files.
        broken = folder.with_name(f".{folder.name}.{os.getpid()}.broken.tmp")
        try:
            folder.rename(broken)
        except FileNotFoundError:
            continue
        if broken.is_dir():
            shutil.rmtree(broken, ignore_errors=True)
        else:
            broken.unlink()
    raise DemoError(f"the cache folder {folder} keeps changing: is another demo rebuilding it?")


def _remove_stale_builds(folder: Path) -> None:
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        if not _is_running(path.name.removeprefix(f".{folder.name}.").partition(".")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: str) -> bool:
    """Whether the process that builds is alive; a folder that names none is a remnant."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _manifest_checksum(body: object) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_CHECK_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
