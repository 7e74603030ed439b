"""Driving the screen of `top` in tests: keys in, the characters on the screen out."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Awaitable, Callable
from typing import Any

from moe_telemetry.top.app import TopApp

CELL = 12.2
"""Width of a character in a picture."""
_TEXT = re.compile(r'<text class="[^"]*-r\d+"([^>]*)>(.*?)</text>')


def rows(svg: str) -> list[str]:
    """The screen's lines, from a picture of it."""
    found: dict[float, str] = {}
    for attributes, words in _TEXT.findall(svg):
        x, y = (float(re.search(rf'\b{key}="([\d.]+)"', attributes)[1]) for key in "xy")
        found[y] = found.get(y, "").ljust(round(x / CELL)) + html.unescape(words).replace("\xa0", " ")
    return [found[y].rstrip() for y in sorted(found)]


def screen(app: TopApp) -> str:
    """What is on the screen now."""
    return "\n".join(rows(app.export_screenshot()))


def drive(app: TopApp, script: Callable[[Any], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    """Run the app on a screen of that size under a script, which is given the pilot."""

    async def session() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await script(pilot)

    asyncio.run(session())


async def press(pilot: Any, *keys: str) -> str:
    """Press keys, and see the screen behind them."""
    await pilot.press(*keys)
    await pilot.pause()
    await pilot.pause()
    return screen(pilot.app)
