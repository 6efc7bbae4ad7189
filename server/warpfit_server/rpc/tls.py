"""TLS of the port: certificates that are read again when their files change.

gRPC asks for the certificates at each handshake, so a renewed one serves the next connection
without a restart. Files that cannot be used, such as a certificate whose key has not been replaced
yet, leave the old ones in force.
"""

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from warpfit.errors import InvalidArgumentError
from warpfit.transport.connection import check_secret
from warpfit_server.config import Config
from warpfit_server.system.file_watcher import WatchedFiles

_LOG: Final = logging.getLogger("warpfit.tls")


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """Make credentials that follow the configured files, or None without TLS.

    Raises:
        InvalidArgumentError: if the files cannot be used.
    """
    if not config.tls_cert:
        return None
    paths = [Path(p) for p in (config.tls_cert, config.tls_key, config.tls_client_ca) if p]
    files = WatchedFiles(paths, lambda: _read(paths), _LOG, seconds=0.1)
    current = files.get()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for the next handshake, or None for no change."""
        nonlocal current
        known, current = current, files.get()
        return None if current is known else current

    fetch: Any = renewed  # gRPC's documentation allows None, its stubs do not
    return grpc.dynamic_ssl_server_credentials(
        current, fetch, require_client_authentication=bool(config.tls_client_ca)
    )


def _read(paths: Sequence[Path]) -> grpc.ServerCertificateConfiguration:
    """Read certificate, key and, for mutual TLS, the authorities of clients.

    Raises:
        InvalidArgumentError: if the files cannot be read, do not belong together, or others can
            read the key.
    """
    certificate, key, *authorities = paths
    try:
        check_secret(key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        for authority in authorities:
            context.load_verify_locations(authority)
        chain, private, *roots = [path.read_bytes() for path in paths]
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            f"the files {', '.join(map(str, paths))} cannot be used for TLS: {error}",
            "BAD_CERTIFICATE",
            "Give PEM files: a certificate chain, its key without a password, authorities",
        ) from error
    return grpc.ssl_server_certificate_configuration([(private, chain)], *roots)
