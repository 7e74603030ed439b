"""mlx_lm, recorded without a change to its code: routing, passes, tokens, requests, for every MoE model it has.

`instrument()` puts functions in the place of some of mlx_lm's that call these and tell the recorder; with the recorder
off each costs a check or two. docs/mlx_lm.md says what is recorded where.
"""

from __future__ import annotations

from .instrumentation import instrument, instrumented, uninstrument

__all__ = ["instrument", "instrumented", "uninstrument"]
