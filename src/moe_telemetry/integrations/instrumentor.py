"""OpenTelemetry's convention: what `opentelemetry-instrument` finds by entry point and calls in every process."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from moe_telemetry.imported import when_imported
from moe_telemetry.programs import model_of

if TYPE_CHECKING:
    from moe_telemetry.telemetry import Telemetry

logger = logging.getLogger("moe_telemetry")

MLX_LM = "mlx-lm>=0.32"
"""As the extras say it."""


class MoeInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # the library's file opts out of types
    """Starts telemetry and instruments mlx_lm when mlx_lm is imported, or at once where it has been.

    A process that never imports it opens no port. Nothing is raised: what fails is logged.
    """

    _call_off: Callable[[], None] | None = None
    telemetry: Telemetry | None = None
    """What runs, once mlx_lm has been imported."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The library that is instrumented, with its versions."""
        return (MLX_LM,)

    def _instrument(self, **kwargs: Any) -> None:
        """`kwargs` are those of `moe_telemetry.start`; others, as for other signals' providers, are left alone.

        Without `meter_provider` it is the global one where that is the SDK's, or else our own with its endpoint.
        """
        self._call_off = when_imported("mlx_lm", partial(self._begin, kwargs))

    def _uninstrument(self, **kwargs: Any) -> None:
        call_off, self._call_off = self._call_off, None
        telemetry, self.telemetry = self.telemetry, None
        if call_off is not None:
            call_off()
        if telemetry is not None:
            from . import mlx_lm

            mlx_lm.uninstrument()
            telemetry.stop()

    def _begin(self, given: dict[str, Any]) -> None:
        try:
            self.telemetry = _started(given)
        except Exception as error:
            logger.warning("the program runs without moe_telemetry: %s", error)
            return
        if self.telemetry.url is not None:
            logger.info("metrics at %s/metrics", self.telemetry.url)
        from . import mlx_lm

        mlx_lm.instrument()


def _started(given: dict[str, Any]) -> Telemetry:
    # Imported here, since the instrumentor is loaded in every process of the interpreter.
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    from moe_telemetry.providers import readers_of
    from moe_telemetry.settings import ConfigurationError
    from moe_telemetry.telemetry import start

    options = {name: value for name, value in given.items() if name in inspect.signature(start).parameters}
    for name, value in (("model", model_of(sys.argv[1:])), ("runtime", "mlx_lm")):
        if not os.environ.get(f"MOE_TELEMETRY_{name.upper()}", "").strip():
            options.setdefault(name, value)
    provider = options.setdefault("meter_provider", metrics.get_meter_provider())
    if not isinstance(provider, MeterProvider):
        options["meter_provider"] = provider = None  # the API's, which records nothing
    try:
        return start(**options)
    except ConfigurationError:
        if provider is None or "port" in options or not readers_of(provider):
            raise
        # The host exports our points: an endpoint on another port is as good.
        return start(**options, port=0)
