"""`moe-telemetry top`: endpoints watched from a terminal.

scrape → window (what two scrapes add) → frame (figures) → watched (an endpoint's state and history) → panes (lines) →
the screen or `--once`. Only `app` and `widgets` know Textual.
"""
