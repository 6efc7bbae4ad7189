"""The server's configuration: one frozen dataclass, read from flags and WARPFIT_* variables."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from warpfit.cli.shared import CommandParser, tell
from warpfit.errors import InvalidArgumentError
from warpfit.server_info import Limits
from warpfit.transport.connection import (
    CLIENT_VARIABLES,
    SERVER_VARIABLES,
    is_loopback,
    unknown_variables,
)
from warpfit_server.logs import json_line
from warpfit_server.machine import (
    EngineDevice,
    available_cores,
    available_memory,
    cannot_listen,
    check_devices,
    engine_devices,
    split_address,
)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_LIMITS: Final = Limits()
#: One message may take this part of the bytes in flight, and in any case this many bytes.
_MESSAGE_PART, _LEAST_MESSAGE_BYTES = 8, 4 << 20
#: Front ends that keep one device busy, if there are cores for them.
_FRONT_ENDS_A_DEVICE: Final = 16
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LAST_PORT: Final = 65_535
_LOOPBACK: Final = "127.0.0.1"
#: Greatest whole number of a setting, and greatest number of seconds, which is 31 years.
MOST_COUNT, _MOST_SECONDS = 2**62, 10**9
#: Most connections of a front-end process: this part of its file descriptors, and at most this
#: number. A quarter of the descriptors is for data sets, the rest for calls in flight.
_CONNECTIONS_PART, _MOST_CONNECTIONS = 0.4, 4096
#: Part of the descriptors for idle result memory of all front ends, most of which each engine has
#: mapped; descriptors of a segment; and most segments, because only some sizes are in use.
_IDLE_PART, _IDLE_FILES, _MOST_IDLE = 1 / 8, 2, 256
#: Result memory that all front ends keep for reuse: at most these bytes, and at most this part of
#: the memory.
_IDLE_BYTES, _IDLE_MEMORY_PART = 512 << 20, 16
#: Niceness of the threads that compute, beside what answers calls.
_ENGINE_NICE: Final = 10
#: Seconds that an engine may take to start, in which it may have to compile its code.
_START_SECONDS: Final = 600.0


def parse_bytes(text: str, least: int = 0) -> int:
    """Return the bytes of a size like ``4096``, ``256MiB`` or ``16GB``; raise ValueError."""
    match = re.fullmatch(r"(\d+)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 4096, 256MiB or 16GB")
    size = int(match[1]) * _UNITS[match[2] or ""]
    if not least <= size <= MOST_COUNT:
        raise ValueError(f"{text!r} is no size from {least} to {MOST_COUNT} bytes")
    return size


def parse_switch(text: str) -> bool:
    """Return the value of ``yes`` or ``no``; raise ValueError."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is neither yes nor no")
    return words[text.lower()]


def parse_port(text: str) -> int:
    """Return the number of a port; raise ValueError."""
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > _LAST_PORT:
        raise ValueError(f"{text!r} is no port; ports are numbers from 0 to {_LAST_PORT}")
    return int(text)


def parse_listener(text: str) -> str:
    """Return HOST:PORT of a port, on loopback if no host is given; raise ValueError."""
    host, colon, port = text.rpartition(":")
    if (colon and not host) or (":" in host and not re.fullmatch(r"\[.*\]", host)):
        raise ValueError(f"{text!r} is no port; write it like 9464, 0.0.0.0:9464 or [::]:9464")
    return f"{host or _LOOPBACK}:{parse_port(port)}"


def parse_number(kind: type[int] | type[float], least: int, text: str) -> float:
    """Return a number of a kind, from ``least`` on; raise ValueError."""
    what, most = ("whole number", MOST_COUNT) if kind is int else ("number", _MOST_SECONDS)
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ValueError(f"{text.strip()!r} is no {what} from {least} to {most}")
    return number


def _option(
    default: Any, text: str, choices: Sequence[str] | None = None, *, least: int = 0
) -> Any:
    metadata = {"help": text, "choices": choices, "least": least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of the server.

    Each field ``some_name`` is the flag ``--some-name`` and the variable ``WARPFIT_SOME_NAME``; a
    flag wins over a variable. Names that end with ``bytes`` or ``memory`` are sizes, names that end
    with ``port`` are ports, to which those of health checks and metrics add a host.
    """

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50551, "port to listen on; 0 takes a free one")
    devices: str = _option(
        "auto",
        "one engine for each: all GPUs, their numbers such as 0,1,3, cpu, or cpu:2 for two CPU "
        "engines; auto takes all GPUs, or else cpu",
    )
    device_memory: int | None = _option(
        None, "bytes of each GPU to use; more data are streamed (default: 90 percent)"
    )
    address_file: str = _option(
        "", "write HOST:PORT into FILE.HOST-PORT while the server is ready, for file://FILE"
    )
    parent: int = _option(
        0,
        "end with this process, which has started the server, or when a pipe that is the server's "
        "standard input is closed; 0 for none",
    )
    front_ends: int = _option(
        0, "front-end processes; 0 makes one for each core but one, at most 16 for each device"
    )
    threads: int | None = _option(
        None, "threads of all CPU engines together (default: one for each core)", least=1
    )
    cache_dir: str = _option("", "directory of compiled code (default: the user's cache)")
    data_root: str = _option("", "folder whose Parquet files callers may open (default: none)")
    log_level: str = _option("info", "least level of log lines", _LOG_LEVELS)
    log_format: str = _option("text", "form of the log lines", ("text", "json"))
    grace: float = _option(10.0, "seconds that calls may take to finish on SIGTERM")
    notice: float = _option(
        0.0, "seconds on SIGTERM between the end of readiness and refusing new calls"
    )
    health_port: str | None = _option(
        None, "plain port, or HOST:PORT, for health checks only; 0 takes a free one (default: none)"
    )
    metrics_port: str | None = _option(
        None, "HTTP port, or HOST:PORT, of the metrics; 0 takes a free one (default: none)"
    )
    expose_tenants: bool = _option(
        False, "allow a metrics port on a network although it tells the names of the tenants"
    )
    hang_seconds: float = _option(
        30.0,
        "seconds without an answer after which an engine is replaced; a tenth of them without one "
        "ends readiness, and a cancelled request may take four times as long",
    )
    message_seconds: float = _option(
        30.0, "seconds in which a message of a call must arrive completely"
    )
    max_resident_bytes: int | None = _option(None, "all data sets (default: half of the memory)")
    max_result_bytes: int = _option(_LIMITS.result_bytes, "one answer")
    max_requests: int = _option(_LIMITS.requests, "calls in flight, in all front ends")
    max_searches: int = _option(
        _LIMITS.searches, "searches at the same time, in all front ends; 0 refuses them"
    )
    max_queue_seconds: float = _option(60.0, "estimated engine time of a tenant's calls in flight")
    max_pending_bytes: int | None = _option(
        None, "arriving messages, batches and answers in flight (default: a quarter of the memory)"
    )
    lease_seconds: float = _option(86_400.0, "an unused data set is removed after this time")
    insecure: bool = _option(False, "allow plain text on a network")
    tls_cert: str = _option("", "file with the certificate chain; switches TLS on")
    tls_key: str = _option("", "file with the certificate's key")
    tls_client_ca: str = _option("", "file with the authorities of client certificates, required")
    token_file: str = _option("", "file with the hashes of bearer tokens, required then")
    tenants_file: str = _option("", "file with limits of tenants (TOML)")

    chunk_bytes: ClassVar[int] = 1 << 20
    """Bytes of values in one message of an answer."""

    @property
    def engines(self) -> tuple[EngineDevice, ...]:
        """The device of each engine, once `devices` is resolved."""
        return engine_devices(self.devices)

    def engine_threads(self, number: int) -> int | None:
        """Return the threads of an engine by its number; None lets the engine decide."""
        count = len(self.engines)
        if count <= 1:
            return self.threads
        each, left = divmod(self.threads or available_cores(), count)
        return max(1, each + (number < left))

    @property
    def engine_nice(self) -> int:
        """Niceness of the threads that compute; a server with a parent serves nobody else."""
        return 0 if self.parent else _ENGINE_NICE

    @property
    def probe_seconds(self) -> float:
        """Pause between two probes of an engine."""
        return self.hang_seconds / 15

    @property
    def probe_timeout(self) -> float:
        """Seconds without an answer to a probe after which a device is not ready."""
        return self.hang_seconds / 10

    @property
    def stuck_seconds(self) -> float:
        """Seconds that a cancelled request may take to stop."""
        return 4 * self.hang_seconds

    @property
    def start_seconds(self) -> float:
        """Seconds that an engine or a front end may take to start."""
        return max(_START_SECONDS, 20 * self.hang_seconds)

    @property
    def processes(self) -> int:
        """Number of front-end processes."""
        if self.front_ends:
            return self.front_ends
        most = _FRONT_ENDS_A_DEVICE * max(1, len(self.engines))
        return max(1, min(most, available_cores() - 1))

    @property
    def connections(self) -> int:
        """Most connections of one front-end process."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(_MOST_CONNECTIONS, int(files * _CONNECTIONS_PART))

    @property
    def idle_pool(self) -> tuple[int, int]:
        """Bytes and segments of result memory that each front end keeps for reuse at most."""
        total = min(_IDLE_BYTES, available_memory() // _IDLE_MEMORY_PART)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        segments = min(_MOST_IDLE, int(files * _IDLE_PART) // _IDLE_FILES)
        return total // self.processes, max(1, segments // self.processes)

    @property
    def open_calls(self) -> int:
        """Most open calls of a front-end process, each of which has a thread.

        They are twice as many as calls in flight: half of them wait for another request, or for an
        engine to stop.
        """
        return 2 * max(1, self.max_requests)

    @property
    def has_tenants(self) -> bool:
        """Whether callers are authenticated, so that there may be several tenants."""
        return bool(self.token_file or self.tls_client_ca)

    @property
    def cache_path(self) -> Path | None:
        """Directory of compiled code, or None for the engine's default."""
        return Path(self.cache_dir) if self.cache_dir else None

    @property
    def pending_bytes(self) -> int:
        """Most bytes of arriving messages, batches and answers in flight."""
        return self.max_pending_bytes or available_memory() // 4

    @property
    def message_bytes(self) -> int:
        """Most bytes of a message, so that a few calls can send one at the same time."""
        part = max(_LEAST_MESSAGE_BYTES, self.pending_bytes // _MESSAGE_PART)
        return min(_LIMITS.message_bytes, part)

    def check_memory(self) -> None:
        """Refuse limits above the memory that there is: the kernel would end the server instead.

        Raises:
            InvalidArgumentError: names the first one.
        """
        memory = available_memory()
        for name in ("max_resident_bytes", "max_pending_bytes"):
            if (getattr(self, name) or 0) > memory:
                raise InvalidArgumentError(
                    f"--{name.replace('_', '-')} allows {getattr(self, name) / 2**30:.1f} GiB, "
                    f"where this server may use {memory / 2**30:.1f} GiB",
                    "OVER_MEMORY",
                    "Give less, or leave the setting out for a part of the memory",
                    name,
                )

    def check_exposure(self) -> None:
        """Refuse settings that would expose plain text or the names of tenants to a network.

        Raises:
            InvalidArgumentError: if TLS is half configured, if other machines could reach the port
                in plain text without ``--insecure``, or the metrics of several tenants without
                ``--expose-tenants``.
            UnavailableError: if no machine has the host's name.
        """
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise InvalidArgumentError(
                "TLS is only half configured",
                "INCOMPLETE_CERTIFICATE",
                "Give --tls-cert and --tls-key together; --tls-client-ca needs both",
            )
        if not (self.tls_cert or self.insecure or is_loopback(self.host)):
            try:
                socket.getaddrinfo(self.host, self.port)
            except (OSError, UnicodeError) as error:
                raise cannot_listen(self.host, self.port, "--host", error) from error
            raise InvalidArgumentError(
                f"plain text on {self.host} can be read and changed by others on the network",
                "INSECURE",
                "Give --tls-cert and --tls-key, listen on 127.0.0.1, or accept it with --insecure",
            )
        if self.metrics_port is None or not self.has_tenants or self.expose_tenants:
            return
        host, port = split_address(self.metrics_port)
        if not is_loopback(host):
            raise InvalidArgumentError(
                f"whoever can reach the metrics port on {host} can read the names of the tenants "
                "and how much they compute",
                "TENANTS_EXPOSED",
                f"Listen with --metrics-port 127.0.0.1:{port}, or keep others away by a firewall "
                "or network policy and give --expose-tenants",
            )

    def limits(self) -> Limits:
        """Return the limits, as clients see them."""
        resident = self.max_resident_bytes
        resident = available_memory() // 2 if resident is None else resident
        return Limits(
            message_bytes=self.message_bytes,
            dataset_bytes=max(_LIMITS.dataset_bytes, resident),
            resident_bytes=resident,
            result_bytes=self.max_result_bytes,
            requests=self.max_requests,
            searches=self.max_searches,
        )

    def to_json(self) -> str:
        """Serialize for the other processes of the server."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read settings that `to_json` wrote."""
        return cls(**json.loads(text))

    @classmethod
    def from_arguments(
        cls, arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> Config:
        """Read flags and variables; print help or an error and exit where they are wrong."""
        parser = _Parser(
            prog="warpfit serve",
            usage="warpfit serve [--setting VALUE ...]",  # naming all flags would hide an error
            description="Serve expression evaluation over gRPC.",
            epilog="Each flag --some-name may also be set as WARPFIT_SOME_NAME. Sizes may be "
            "written like 256MiB.",
        )
        form = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        form.add_argument("--log-format", default=environment.get("WARPFIT_LOG_FORMAT", ""))
        with suppress(argparse.ArgumentError):  # of a flag without its value
            found = str(form.parse_known_args(arguments)[0].log_format)
            parser.logs_json = found.lower() == "json"
        for sentence in unknown_variables(environment, CLIENT_VARIABLES | SERVER_VARIABLES):
            parser.error(sentence)
        for setting in fields(cls):
            name, choices = setting.name, setting.metadata["choices"]
            variable, text = f"WARPFIT_{name.upper()}", setting.metadata["help"]
            default: Any = environment.get(variable, setting.default)
            if choices and default.lower() not in choices:  # argparse does not check defaults
                parser.error(f"{variable} must be one of {choices}")
            if default not in (None, ""):  # of the environment, it may be, instead of the usual one
                text = f"{text.partition(' (default: ')[0]} (default: %(default)s)"
            switch: dict[str, Any] = {"nargs": "?", "const": True} if setting.type == "bool" else {}
            parser.add_argument(
                "--" + name.replace("_", "-"),
                default=default,
                type=partial(_parsed, setting),
                choices=choices,
                help=text,
                metavar=None if choices else name.split("_")[-1].upper(),
                **switch,
            )
        return cls(**vars(parser.parse_args(arguments)))


class _Parser(CommandParser):
    """Says what is wrong in the form of the log."""

    logs_json = False

    def error(self, message: str) -> NoReturn:
        if not self.logs_json:
            super().error(message)
        tell(json_line(self.with_remedy(message), "error", reason="BAD_OPTION"))
        raise SystemExit(2)


def _parsed(setting: Any, text: str) -> Any:
    """Parse the text of a setting by its name, its type or its choices.

    argparse prints the text of this error, and would replace that of a ValueError.
    """
    name, kind, least = setting.name, setting.type.split()[0], setting.metadata["least"]
    try:
        if name == "devices":
            return check_devices(text)
        if name.endswith(("bytes", "memory")):
            return parse_bytes(text, least)
        if name.endswith("port"):
            return parse_port(text) if kind == "int" else parse_listener(text)
        if name.endswith("host"):
            return text.removeprefix("[").removesuffix("]")  # as IPv6 in addresses
        if kind == "bool":
            return parse_switch(text)
        if kind in ("int", "float"):
            return parse_number(int if kind == "int" else float, least, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text.lower() if setting.metadata["choices"] else text
