"""The server's configuration: one frozen dataclass, read from flags and WARPFIT_* variables."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from warpfit.cli.parser import CommandParser
from warpfit.cli.standard_streams import tell
from warpfit.errors import InvalidArgumentError
from warpfit.server_info import Limits
from warpfit.transport.connection import is_loopback
from warpfit.variables import CLIENT_VARIABLES, SERVER_VARIABLES, unknown_variables
from warpfit_server.observability.logs import json_line
from warpfit_server.system.machine import (
    EngineDevice,
    available_cores,
    available_memory,
    check_devices,
    engine_devices,
)
from warpfit_server.system.sockets import cannot_listen

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_LIMITS: Final = Limits()
#: One message may take this part of the bytes in flight, and in any case this many bytes.
_MESSAGE_PART, _LEAST_MESSAGE_BYTES = 8, 4 << 20
#: Front ends that keep one device busy, if there are cores for them.
_FRONT_ENDS_A_DEVICE: Final = 16
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LAST_PORT: Final = 65_535
#: Greatest whole number of a setting, and greatest number of seconds, which is 31 years.
_MOST_COUNT, _MOST_SECONDS = 2**62, 10**9
#: Default of the most connections of a front-end process: this part of its file descriptors, and
#: at most this number. A quarter of the descriptors is for data sets, the rest for calls in flight.
_CONNECTIONS_PART, _MOST_CONNECTIONS = 0.4, 4096
#: Part of the descriptors for idle result memory of all front ends, most of which each engine has
#: mapped; descriptors of a segment; and most segments, because only some sizes are in use.
_IDLE_PART, _IDLE_FILES, _MOST_IDLE = 1 / 8, 2, 256
#: Default of the result memory that all processes keep: at most these bytes, and at most this
#: part of the memory.
_IDLE_BYTES, _IDLE_MEMORY_PART = 512 << 20, 16


def parse_bytes(text: str, least: int = 0) -> int:
    """Return the bytes of a size like ``4096``, ``256MiB`` or ``16GB``; raise ValueError."""
    match = re.fullmatch(r"(\d+)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 4096, 256MiB or 16GB")
    size = int(match[1]) * _UNITS[match[2] or ""]
    if not least <= size <= _MOST_COUNT:
        raise ValueError(f"{text!r} is no size from {least} to {_MOST_COUNT} bytes")
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


def parse_number(kind: type[int] | type[float], least: int, text: str) -> float:
    """Return a number of a kind, from ``least`` on; raise ValueError."""
    what, most = ("whole number", _MOST_COUNT) if kind is int else ("number", _MOST_SECONDS)
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
    with ``port`` are ports.
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
    engine_nice: int = _option(
        10, "niceness of the threads that compute, beside what answers calls; 19 is the most"
    )
    cache_dir: str = _option("", "directory of compiled code (default: the user's cache)")
    data_root: str = _option("", "folder whose Parquet files callers may open (default: none)")
    log_level: str = _option("info", "least level of log lines", _LOG_LEVELS)
    log_format: str = _option("text", "form of the log lines", ("text", "json"))
    tracing: str = _option("none", "where OpenTelemetry traces go", ("none", "otlp"))
    grace: float = _option(10.0, "seconds that calls may take to finish on SIGTERM")
    notice: float = _option(
        0.0, "seconds on SIGTERM between the end of readiness and refusing new calls"
    )
    health_port: int | None = _option(
        None, "plain port for health checks only; 0 takes a free one (default: none)"
    )
    health_host: str = _option("127.0.0.1", "address of the health port")
    metrics_port: int | None = _option(
        None, "HTTP port of the metrics; 0 takes a free one (default: none)"
    )
    metrics_host: str = _option("127.0.0.1", "address of the metrics port")
    expose_tenants: bool = _option(
        False, "allow a metrics port on a network although it tells the names of the tenants"
    )
    probe_seconds: float = _option(2.0, "pause between probes of the engine")
    probe_timeout: float = _option(
        3.0, "seconds without an answer to a probe after which the server is not ready"
    )
    hang_seconds: float = _option(
        30.0, "seconds without an answer after which the engine is replaced"
    )
    stuck_seconds: float = _option(120.0, "seconds that a cancelled request may take to stop")
    start_seconds: float = _option(600.0, "seconds that an engine may take to start")
    chunk_bytes: int = _option(1 << 20, "bytes of values in one message of an answer", least=1)
    idle_bytes: int | None = _option(
        None,
        "result memory that all front ends together keep for reuse (default: 512 MiB, but at most "
        "a sixteenth of the memory)",
    )
    max_message_bytes: int = _option(
        _LIMITS.message_bytes,
        "one message; also at most an eighth of --max-pending-bytes, but 4 MiB are always allowed",
    )
    message_seconds: float = _option(
        30.0, "seconds in which a message of a call must arrive completely"
    )
    max_dataset_bytes: int = _option(_LIMITS.dataset_bytes, "one data set")
    max_resident_bytes: int | None = _option(None, "all data sets (default: half of the memory)")
    max_programs: int = _option(_LIMITS.programs, "programs in a batch")
    max_tokens: int = _option(_LIMITS.tokens, "tokens in a batch")
    max_program_tokens: int = _option(_LIMITS.program_tokens, "tokens in a program")
    max_vectors: int = _option(_LIMITS.vectors, "parameter vectors for each program")
    max_result_bytes: int = _option(_LIMITS.result_bytes, "one answer")
    max_requests: int = _option(_LIMITS.requests, "calls in flight, in all front ends")
    max_connections: int | None = _option(
        None,
        "connections of each front end (default: 2 of 5 file descriptors, at most 4,096)",
    )
    max_rows: int = _option(_LIMITS.rows, "rows of a data set")
    max_searches: int = _option(
        _LIMITS.searches, "searches at the same time, in all front ends; 0 refuses them"
    )
    max_loss_tokens: int = _option(_LIMITS.loss_tokens, "tokens in a caller's own loss function")
    max_names: int = _option(_LIMITS.names, "variable names of a data set")
    max_name_bytes: int = _option(_LIMITS.name_bytes, "all variable names of a data set")
    max_rate: float = _option(_LIMITS.rate, "calls a second; 0 for no limit")
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
        return self.max_connections or min(_MOST_CONNECTIONS, int(files * _CONNECTIONS_PART))

    @property
    def idle_pool(self) -> tuple[int, int]:
        """Bytes and segments of result memory that each front end keeps for reuse at most."""
        total = self.idle_bytes
        if total is None:
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
        return min(self.max_message_bytes, part)

    def check_memory(self) -> None:
        """Refuse limits above the memory that there is: the kernel would end the server instead.

        Raises:
            InvalidArgumentError: names the first one.
        """
        memory = available_memory()
        for name in ("max_resident_bytes", "max_pending_bytes", "idle_bytes"):
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
        is_public = self.metrics_port is not None and not is_loopback(self.metrics_host)
        if is_public and self.has_tenants and not self.expose_tenants:
            raise InvalidArgumentError(
                f"whoever can reach the metrics port on {self.metrics_host} can read the names of "
                "the tenants and how much they compute",
                "TENANTS_EXPOSED",
                "Listen with --metrics-host 127.0.0.1, or keep others away by a firewall or "
                "network policy and give --expose-tenants",
            )

    def limits(self) -> Limits:
        """Return the limits, as clients see them."""
        computed = ("message_bytes", "resident_bytes")
        names = [f.name for f in fields(Limits) if f.name not in computed]
        resident = self.max_resident_bytes
        return Limits(
            message_bytes=self.message_bytes,
            resident_bytes=available_memory() // 2 if resident is None else resident,
            **{name: getattr(self, f"max_{name}") for name in names},
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
        parser.logs_json = _wants_json(arguments, environment)
        for sentence in unknown_variables(environment, CLIENT_VARIABLES | SERVER_VARIABLES):
            parser.error(sentence)
        for setting in fields(cls):
            name, choices = setting.name, setting.metadata["choices"]
            variable, text = f"WARPFIT_{name.upper()}", setting.metadata["help"]
            default: Any = environment.get(variable, setting.default)
            if choices and default.lower() not in choices:  # argparse does not check defaults
                parser.error(f"{variable} must be one of {choices}")
            switch: dict[str, Any] = {"nargs": "?", "const": True} if setting.type == "bool" else {}
            parser.add_argument(
                "--" + name.replace("_", "-"),
                default=default,
                type=_parser_of(setting),
                choices=choices,
                help=text if default in (None, "") else f"{text} (default: %(default)s)",
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


def _wants_json(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> bool:
    """Return whether the log is JSON, before the other settings are read."""
    form = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    form.add_argument("--log-format", default=environment.get("WARPFIT_LOG_FORMAT", ""))
    try:
        return str(form.parse_known_args(arguments)[0].log_format).lower() == "json"
    except argparse.ArgumentError:  # a flag without its value
        return False


def _parser_of(setting: Any) -> Callable[[str], Any]:
    """Return the parser of a setting's text, by its name, choices or type."""
    if setting.name == "devices":
        return _with_reason(check_devices)
    if setting.name.endswith(("bytes", "memory")):
        return _with_reason(partial(parse_bytes, least=setting.metadata["least"]))
    if setting.name.endswith("port"):
        return _with_reason(parse_port)
    if setting.name.endswith("host"):
        return lambda text: text.removeprefix("[").removesuffix("]")  # as IPv6 in addresses
    if setting.type == "bool":
        return _with_reason(parse_switch)
    kind = {"int": int, "float": float}.get(setting.type.split()[0])
    if kind is not None:
        return _with_reason(partial(parse_number, kind, setting.metadata["least"]))
    return str.lower if setting.metadata["choices"] else str


def _with_reason(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print the text of a ValueError, which it replaces by one of its own."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
