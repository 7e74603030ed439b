"""Writes everything that is generated: the references in docs/, dashboards, rules and configuration.

`python docs/generate.py`, or with `--check`: fail when something committed is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import page_api
import page_cli
import page_metrics

from moe_telemetry.monitoring import dashboards, export
from moe_telemetry.monitoring.config import Config

ROOT = Path(__file__).parent.parent


def files() -> dict[Path, str]:
    """Everything that is generated, as texts by path."""
    config = Config()
    found = {ROOT / "dashboards" / path: text for path, text in export.files(config).items()}
    pages = {
        "metrics.md": page_metrics.page(config),
        "panels.md": dashboards.panel_reference(config),
        "cli.md": page_cli.page(),
        "api.md": page_api.page(),
    }
    found |= {ROOT / "docs" / name: text for name, text in pages.items()}
    return found


def main() -> int:
    """Write the files, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not what would be generated: run make generate", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
