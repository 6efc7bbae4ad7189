"""TLS for the port: certificates that are read again when their files change.

Each handshake asks for the certificates, so a renewed one serves the next connection without a
restart. Files that cannot be used, such as a certificate whose key has not been replaced yet, leave
the old ones in force.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any, Final

import grpc

from warpfit.errors import InvalidArgumentError
from warpfit.transport.security import check_secret, is_loopback
from warpfit_server.config import Config
from warpfit_server.system.file_watcher import Watch

_LOG: Final = logging.getLogger("warpfit.tls")


def check_exposure(config: Config) -> None:
    """Refuse settings that would put plain text, or nobody's control, on a network.

    Raises:
        InvalidArgumentError: if TLS is half configured, if the port can be reached from other
            machines in plain text without ``--insecure``, or the metrics of several tenants
            without ``--expose-tenants``.

    """
    if bool(config.tls_cert) != bool(config.tls_key) or (
        config.tls_client_ca and not config.tls_cert
    ):
        raise InvalidArgumentError(
            "TLS is only half configured",
            "INCOMPLETE_CERTIFICATE",
            "Give --tls-cert and --tls-key together; --tls-client-ca needs both",
        )
    if not (config.tls_cert or config.insecure or is_loopback(config.host)):
        raise InvalidArgumentError(
            f"plain text on {config.host} can be read and changed by others on the network",
            "INSECURE",
            "Give --tls-cert and --tls-key, listen on 127.0.0.1, or accept it with --insecure",
        )
    is_public = config.metrics_port is not None and not is_loopback(config.metrics_host)
    has_tenants = bool(config.token_file or config.tls_client_ca)
    if is_public and has_tenants and not config.expose_tenants:
        raise InvalidArgumentError(
            f"whoever can reach the metrics port on {config.metrics_host} can read the names of "
            "the tenants and how much they compute",
            "TENANTS_EXPOSED",
            "Listen with --metrics-host 127.0.0.1, or keep others away by a firewall or network "
            "policy and give --expose-tenants",
        )


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; one of IPv6 gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Certificates:
    """The server's certificate, key and, for mutual TLS, the authorities of its clients."""

    def __init__(self, certificate: str, key: str, client_ca: str) -> None:
        self._paths = [Path(path) for path in (certificate, key, client_ca) if path]
        self._mutual = bool(client_ca)
        self._watch = Watch(self._paths, seconds=0.1)
        self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Make credentials that follow the files."""
        renewed: Any = self._renewed  # gRPC's own documentation allows None, its stubs do not
        return grpc.dynamic_ssl_server_credentials(
            self._current, renewed, require_client_authentication=self._mutual
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what to use from now on, or None for no change; gRPC asks at each handshake."""
        if not self._watch.changed():
            return None
        try:
            self._current = self._read()
        except InvalidArgumentError as error:
            _LOG.error("the old certificate stays in use: %s", error)
            return None
        _LOG.info("the certificate was renewed")
        return self._current

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Read the files.

        Raises:
            InvalidArgumentError: if they cannot be read, do not belong together, or others can read
                the key.

        """
        certificate, key, *authorities = self._paths
        try:
            check_secret(key)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            for authority in authorities:
                context.load_verify_locations(authority)
            contents = [path.read_bytes() for path in self._paths]
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgumentError(
                f"the files {', '.join(map(str, self._paths))} cannot be used for TLS: {error}",
                "BAD_CERTIFICATE",
                "Give PEM files: a certificate chain, its key without a password, authorities",
            ) from error
        roots = contents[2] if authorities else None
        pairs = [(contents[1], contents[0])]
        return grpc.ssl_server_certificate_configuration(pairs, roots)


def add_port(server: Any, config: Config, port: int) -> int:
    """Open a port with TLS if it is configured, else in plain text; return its number.

    Raises:
        RuntimeError: if it is taken.
        InvalidArgumentError: if the files of TLS cannot be used.

    """
    address = join_address(config.host, port)
    if not config.tls_cert:
        number = server.add_insecure_port(address)
    else:
        certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        number = server.add_secure_port(address, certificates.credentials())
    return int(number)
