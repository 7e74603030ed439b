"""`moe-telemetry export DIR`: dashboards, rules and configuration for a site, written from the installed package."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from moe_telemetry.settings import ConfigurationError

from . import shipped
from .config import Config


def files(config: Config) -> dict[str, str]:
    """Everything that is generated: path below dashboards/ -> text.

    Without the extra `dashboards` what the package ships, which is the default configuration's.
    """
    try:
        from . import dashboards, generate
    except ModuleNotFoundError as error:
        if config == Config() and (found := shipped.files()):
            return found
        newer = " with Python 3.11 or newer" if sys.version_info < (3, 11) else ""
        raise ConfigurationError(
            f"this needs {error.name}, the extra `dashboards`: pip install 'moe-telemetry[dashboards]'{newer};"
            " what the package ships, which `export` without options writes, needs none"
        ) from error
    try:
        return {**generate.files(config), **dashboards.files(config)}
    except ValueError as error:  # a threshold that its alert cannot hold exactly
        raise ConfigurationError(str(error)) from None


def write(config: Config, folder: Path) -> list[Path]:
    """Write all files below `folder`; ConfigurationError when that cannot be."""
    written = []
    for path, text in files(config).items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {target}: {error.strerror}") from None
        written.append(target)
    return written


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that change the configuration."""
    add = parser.add_argument
    add("--job", default=Config.job, help="Prometheus' job of the runtimes (%(default)s)")
    add("--runbook-url", default=Config.runbook_url, help="where docs/runbook.md is published")
    add("--threshold", action="append", default=[], metavar="NAME=VALUE", help="change a threshold; may be repeated")


def config_of(options: argparse.Namespace) -> Config:
    """The configuration that the options describe."""
    config = Config(job=options.job, runbook_url=options.runbook_url)
    for given in options.threshold:
        name, _, text = given.partition("=")
        try:
            value = float(text)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(text)
        except ValueError:
            raise ConfigurationError(
                f"--threshold {given}: a number is expected, as in {name or 'recall_low'}=0.5"
            ) from None
        try:
            config = config.with_threshold(name, value)
        except ValueError as error:
            raise ConfigurationError(f"--threshold {given}: {error}") from None
    return config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; made when it is missing")
    parser.add_argument("--targets", metavar="HOST:PORT,...", help="exporters for Prometheus to scrape")
    parser.add_argument(
        "--datasource-uid",
        metavar="UID",
        help="a Prometheus datasource that your Grafana has; without it, one is provisioned",
    )
    parser.add_argument("--grafana-url", default=Config.grafana_url, help="what alerts link to (%(default)s)")
    add_config_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Write the files and say where."""
    config = replace(config_of(options), grafana_url=options.grafana_url)
    if options.datasource_uid:
        config = replace(config, datasource_uid=options.datasource_uid)
    if options.targets:
        config = replace(config, targets=tuple(options.targets.split(",")), names=())
    written = write(config, options.folder)
    print(f"{len(written)} files written to {options.folder}:")
    for path in written:
        print(f"  {path.relative_to(options.folder)}")
    return 0
