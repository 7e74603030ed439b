"""The generated files as the package ships them, for those who have not installed what generates them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PLACES = (Path(__file__).parent / "generated", Path(__file__).parents[3] / "dashboards")
"""In an installed package, in a checkout."""


def files() -> dict[str, str]:
    """Path below dashboards/ -> text; of the default configuration. Nothing where a package was built without them."""
    place = next((place for place in _PLACES if (place / "grafana").is_dir()), None)
    if place is None:
        return {}
    found = (path for suffix in ("json", "yml") for path in sorted(place.rglob(f"*.{suffix}")))
    return {path.relative_to(place).as_posix(): path.read_text(encoding="utf-8") for path in found}


def dashboards() -> dict[str, dict[str, Any]]:
    """File name -> dashboard as plain data, as `dashboards.build` has them for the default configuration."""
    shipped = {Path(path).name: text for path, text in files().items() if path.endswith(".json")}
    return {name: json.loads(text) for name, text in shipped.items()}
