"""A small Mixture-of-Experts transformer whose experts are really streamed from disk, instrumented with the hooks.

Nothing is imported here: `moe_telemetry.demo.settings` needs the standard library only, `moe_telemetry.demo.engine`
needs mlx and numpy.
"""
