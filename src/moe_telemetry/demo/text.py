"""The text that decode follows, and the draft made from it."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

from .settings import DemoError

DRAFT_CONFIDENCE = 0.35
"""A verify pass is worth its tokens when the draft's first byte follows at least this often."""


def load_text(path: Path | None) -> bytes:
    """The bytes of `path`, or of the texts in this package, one behind the other."""
    if path is None:
        folder = resources.files(__package__ or __name__).joinpath("texts")
        return b"\n".join(
            file.read_bytes() for file in sorted(folder.iterdir(), key=lambda f: f.name) if file.name.endswith(".txt")
        )
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read the text file {path}: {error.strerror}") from error
    if not text:
        raise DemoError(f"the text file {path} is empty")
    return text


class LoopedText:
    """A text read for ever: behind its last byte comes its first."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0

    def peek(self, n: int) -> list[int]:
        """The next `n` bytes."""
        return [self._text[(self._at + i) % len(self._text)] for i in range(n)]

    def advance(self, n: int) -> None:
        """Go on by `n` bytes."""
        self._at = (self._at + n) % len(self._text)


class BigramDraft:
    """Proposes, for a byte, the one that most often follows it in the text."""

    def __init__(self, text: bytes) -> None:
        counts = Counter(zip(text, text[1:] + text[:1], strict=True))
        totals = Counter(text)
        self._next: list[tuple[int, float]] = [(0, 0.0)] * 256
        for (first, second), count in sorted(counts.items()):
            share = count / totals[first]
            if share > self._next[first][1]:
                self._next[first] = (second, share)

    def propose(self, byte: int, n: int) -> list[int]:
        """The `n` bytes that probably follow `byte`; none where the table is not sure of the first."""
        if self._next[byte][1] < DRAFT_CONFIDENCE:
            return []
        draft: list[int] = []
        for _ in range(n):
            byte = self._next[byte][0]
            draft.append(byte)
        return draft
