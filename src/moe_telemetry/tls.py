"""TLS for the endpoint, from PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

from .settings import ConfigurationError


def server_context(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """A server's context, None without `cert`; with `client_ca` clients must show a certificate signed by it."""
    if cert is None:
        if key is None and client_ca is None:
            return None
        raise ConfigurationError("tls_key and tls_client_ca need tls_cert, or metrics would be served in the clear")
    try:
        for path in (cert, key, client_ca):
            if path is not None:
                Path(path).open("rb").close()  # whose error names the path, unlike OpenSSL's
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        at = cert if key is None else f"{cert} and {key}"
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            at = client_ca
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ConfigurationError(f"cannot serve metrics over TLS: {at}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot serve metrics over TLS: {error}") from None
    return context
