"""Reading an endpoint from outside: its address as people type it, and a request that ends."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit, urlunsplit

from .settings import DEFAULT_HOST, DEFAULT_PORT
from .terminal import printable

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 64 << 20
"""Of a reply; a scrape of 94 layers is half a MiB."""
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"


class ClientError(ValueError):
    """An endpoint that was not reached or gave no answer; the message is a reason of a few words."""


def base_url(given: str) -> str:
    """The endpoint's address without a path of ours, from `http(s)://host[:port][/prefix][/metrics]` or `host[:port]`.

    Raises:
        ClientError: it is no such address.
    """
    text = given.strip()
    if not text or any(char.isspace() or not char.isprintable() for char in text):
        raise ClientError(f"{given!r} is no address: give http://host:port or host:port")
    bare = "://" not in text
    try:
        parts = urlsplit(f"http://{text}" if bare else text)
        port = parts.port
    except ValueError:
        raise ClientError(f"{given!r} is no address: give http://host:port or host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ClientError(f"{given!r} is no address of an endpoint: give http://host:port or host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None and bare:
        port = DEFAULT_PORT
    path = parts.path.rstrip("/")
    for ours in ("/metrics", "/snapshot"):
        path = path.removesuffix(ours)
    return urlunsplit((parts.scheme, host if port is None else f"{host}:{port}", path, "", ""))


def get(url: str, accept: str, seconds: float = TIMEOUT_SECONDS, most: int = MAX_BYTES) -> bytes:
    """The body of a GET, which is over within about twice `seconds` whatever the other side does.

    The look-up of a host name is the resolver's own time.

    Raises:
        ClientError: it cannot be reached, does not answer in time, or answers with an error or too much.
    """
    until = time.monotonic() + seconds
    try:
        asked = urllib.request.Request(url, headers={"Accept": accept})
        with _opener(url).open(asked, timeout=seconds) as reply:
            parts = []
            left = most
            while part := reply.read1(1 << 16):
                parts.append(part)
                left -= len(part)
                if left < 0:
                    raise ClientError(f"answers with more than {most >> 20} MiB")
                if time.monotonic() > until:
                    raise ClientError(f"did not finish its answer in {seconds:g} s")
            if reply.length:  # what read1 leaves unsaid
                raise ClientError("ended before its answer did")
    except ClientError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        raise ClientError(_reason(error, seconds)) from None
    return b"".join(parts)


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Loopback is never asked of a proxy."""
    if (urlsplit(url).hostname or "") in ("127.0.0.1", "localhost", "::1"):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _reason(error: Exception, seconds: float) -> str:
    """One line for a person."""
    inner = getattr(error, "reason", None) if isinstance(error, OSError) else None
    cause = inner if isinstance(inner, Exception) else error
    if isinstance(cause, TimeoutError):
        return f"no answer in {seconds:g} s"
    if isinstance(cause, ssl.SSLCertVerificationError):
        words = f"its certificate is not trusted, {cause.verify_message}: name one that is in SSL_CERT_FILE"
    elif isinstance(error, urllib.error.HTTPError):
        words = f"answers {error.code} {error.reason}"
    else:
        words = str(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()
    return printable(" ".join(words.split()))[:200]
