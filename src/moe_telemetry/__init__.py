"""Live telemetry for Mixture-of-Experts models whose experts are streamed from disk."""

from .hooks import Phase, Recorder, recorder

__all__ = ["Phase", "Recorder", "__version__", "recorder"]
__version__ = "0.1.0"
