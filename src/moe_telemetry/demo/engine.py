"""The demo engine: prefill, single-token decode and verify passes over a text, with experts streamed from disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import mlx.core as mx

from .blobs import open_blobs
from .config import ModelConfig
from .disk import SimulatedDisk
from .faults import Fault
from .generation import Generation, RunResult, Step
from .model import ResidentModel
from .moe import StreamedExperts
from .pool import AGING, LRU_AGING, LayerPool
from .prefetch import Prefetcher
from .reader import PrefetchReader
from .settings import DemoError, DemoSettings, default_cache_dir
from .text import BigramDraft, LoopedText, load_text

QUEUE_DEPTH = 32
STAGING_BUFFERS = 16


class Engine:
    """The demo model on its streamed experts. `close`, or leaving the with-block, ends the reader thread.

    Args:
        settings: the run.
        on_build: told, in one line each, what is being built.
        config: the model's shape; tests use a smaller one.
    """

    def __init__(
        self,
        settings: DemoSettings,
        on_build: Callable[[str], None] | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        self.settings = settings
        self.config = config or ModelConfig()
        self.layer_ids = list(range(self.config.layers))
        self.num_layers = self.config.layers
        self.num_experts = self.config.experts
        self.top_k = self.config.top_k
        self.slots = min(settings.slots, self.config.experts)
        self._on_build = on_build or (lambda line: None)
        self._resources = ExitStack()
        self._disk = SimulatedDisk(settings.read_mbps)
        self._reader: PrefetchReader | None = None
        self._fault: Fault | None = None
        self._generation: Generation | None = None

    @property
    def description(self) -> str:
        """One line: the model, its size on disk, the pool and the disk."""
        config = self.config
        return (
            f"{config.layers} layers, {config.experts} experts, top-{config.top_k}, width {config.width}, "
            f"{config.total_bytes / 1e6:.0f} MB on disk, {self.slots} slots a layer, "
            f"reads at {self.settings.read_mbps:g} MB/s"
        )

    @property
    def fault_active(self) -> bool:
        """Whether the chosen fault is on at this moment."""
        return self._fault is not None and self._fault.active

    def prepare(self) -> None:
        """Build or check the cache, load what is resident, and declare the pools to the recorder."""
        config, settings = self.config, self.settings
        text = load_text(settings.text)
        cache_dir = settings.cache_dir or default_cache_dir()
        blobs = self._resources.enter_context(open_blobs(cache_dir, config, settings.seed, self._on_build))
        with mx.stream(mx.cpu):
            model = ResidentModel(config, settings.seed)
            aging = LRU_AGING if settings.lru else AGING
            pools = [LayerPool(config, layer, self.slots, aging) for layer in self.layer_ids]
        prefetcher = None
        if settings.prefetch:
            self._reader = PrefetchReader(blobs, self._disk, config.expert_bytes, QUEUE_DEPTH, STAGING_BUFFERS)
            self._resources.callback(self._reader.close)
            prefetcher = Prefetcher(config, model, pools, self._reader)
        self._fault = Fault(settings, config, self._disk, pools, prefetcher)
        self._generation = Generation(
            config,
            model,
            StreamedExperts(config, model, pools, blobs, self._disk, self._reader, prefetcher, settings.device_routing),
            prefetcher,
            self._fault,
            LoopedText(text),
            BigramDraft(text),
        )

    def run(self, stop: threading.Event, on_step: Callable[[Step], None] | None = None) -> RunResult:
        """Follow the text until `settings.tokens` are decoded or `stop` is set; `on_step` hears of every pass.

        When it returns, the reader is at rest: no hook is called any more.
        """
        if self._generation is None:
            raise RuntimeError("call prepare() before run()")
        self._disk.stop = stop
        try:
            with mx.stream(mx.cpu):
                return self._generation.run(self.settings.tokens, stop, on_step or (lambda step: None))
        except OSError as error:
            raise DemoError(f"reading experts failed: {error.strerror or error}") from error
        finally:
            if self._reader is not None:
                self._reader.drain()

    def close(self) -> None:
        """End the reader thread and close the files; again is harmless."""
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
