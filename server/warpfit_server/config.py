"""The server's configuration: one frozen dataclass, read from flags and WARPFIT_* variables."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from warpfit.server_info import Limits
from warpfit_server.system.resources import available_cores, available_memory

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_LIMITS: Final = Limits()
#: One message may take this part of the bytes in flight, and in any case this many bytes.
_MESSAGE_PART, _LEAST_MESSAGE_BYTES = 8, 4 << 20
_MOST_FRONT_ENDS: Final = 16
_LAST_PORT: Final = 65_535
#: Default of the most connections of a front-end process: this part of its file descriptors, but
#: no more than this.
_CONNECTIONS_PART, _MOST_CONNECTIONS = 0.5, 4096


def parse_bytes(text: str) -> int:
    """Return the bytes of a size like ``4096``, ``256MiB`` or ``16GB``; raise ValueError."""
    match = re.fullmatch(r"(\d+)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 4096, 256MiB or 16GB")
    return int(match[1]) * _UNITS[match[2] or ""]


def parse_switch(text: str) -> bool:
    """Return the value of ``yes`` or ``no``; raise ValueError."""
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is neither yes nor no")
    return words[text.lower()]


def parse_port(text: str) -> int:
    """Return the number of a port; raise ValueError."""
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > _LAST_PORT:
        raise ValueError(f"{text!r} is no port; there are those from 0 to {_LAST_PORT}")
    return int(text)


def _option(
    default: Any,
    text: str,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
) -> Any:
    metadata = {"help": text, "parse": parse, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of the server.

    Each field ``some_name`` is the flag ``--some-name`` and the variable ``WARPFIT_SOME_NAME``; a
    flag wins over a variable.
    """

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(50551, "port to listen on; 0 takes a free one", parse_port)
    engine: str = _option(
        "auto", "auto chooses CUDA if there is a device", choices=("auto", "cpu", "cuda")
    )
    device: int = _option(0, "CUDA device", int)
    front_doors: int = _option(
        0, "front-end processes; 0 chooses one for each core but one, at most 16", int
    )
    threads: int | None = _option(None, "threads of the CPU engine (default: all cores)", int)
    cache_dir: str = _option("", "directory of compiled code (default: the user's cache)")
    log_level: str = _option(
        "info", "lowest level of log lines", str.lower, ("debug", "info", "warning", "error")
    )
    log_format: str = _option("text", "form of the log lines", choices=("text", "json"))
    tracing: str = _option("none", "where OpenTelemetry traces go", choices=("none", "otlp"))
    grace: float = _option(10.0, "seconds that calls may take to finish on SIGTERM", float)
    notice: float = _option(
        0.0, "seconds on SIGTERM between the end of readiness and refusing new calls", float
    )
    health_port: int | None = _option(
        None, "plain port for health checks only; 0 takes a free one (default: none)", parse_port
    )
    health_host: str = _option("127.0.0.1", "address of the health port")
    metrics_port: int | None = _option(
        None, "HTTP port of the metrics; 0 takes a free one (default: none)", parse_port
    )
    metrics_host: str = _option("127.0.0.1", "address of the metrics port")
    expose_tenants: bool = _option(
        False,
        "allow a metrics port on a network although it tells the names of the tenants",
        parse_switch,
    )
    probe_seconds: float = _option(2.0, "pause between probes of the engine", float)
    probe_timeout: float = _option(
        3.0, "seconds without an answer to a probe after which the server is not ready", float
    )
    hang_seconds: float = _option(
        30.0, "seconds without an answer after which the engine is replaced", float
    )
    stuck_seconds: float = _option(
        120.0, "seconds that a cancelled request may take to stop", float
    )
    start_seconds: float = _option(600.0, "seconds that an engine may take to start", float)
    chunk_bytes: int = _option(1 << 20, "bytes of values in one message of an answer", parse_bytes)
    idle_bytes: int = _option(512 << 20, "result memory kept for reuse", parse_bytes)
    max_message_bytes: int = _option(
        _LIMITS.message_bytes,
        "one message; also at most an eighth of --max-pending-bytes, but 4 MiB are always allowed",
        parse_bytes,
    )
    message_seconds: float = _option(
        30.0, "seconds in which a message of a call must arrive completely", float
    )
    max_dataset_bytes: int = _option(_LIMITS.dataset_bytes, "one data set", parse_bytes)
    max_resident_bytes: int | None = _option(
        None, "all data sets (default: half of the memory)", parse_bytes
    )
    max_programs: int = _option(_LIMITS.programs, "programs in a batch", int)
    max_tokens: int = _option(_LIMITS.tokens, "tokens in a batch", int)
    max_program_tokens: int = _option(_LIMITS.program_tokens, "tokens in a program", int)
    max_vectors: int = _option(_LIMITS.vectors, "parameter vectors for each program", int)
    max_result_bytes: int = _option(_LIMITS.result_bytes, "one answer", parse_bytes)
    max_requests: int = _option(_LIMITS.requests, "calls in flight, in all front ends", int)
    max_connections: int | None = _option(
        None,
        "connections of each front-end process (default: half of its file descriptors, at most "
        "4,096)",
        int,
    )
    max_rows: int = _option(_LIMITS.rows, "rows of a data set", int)
    max_loss_tokens: int = _option(
        _LIMITS.loss_tokens, "tokens in a loss function of the caller's own", int
    )
    max_names: int = _option(_LIMITS.names, "variable names of a data set", int)
    max_name_bytes: int = _option(
        _LIMITS.name_bytes, "all variable names of a data set", parse_bytes
    )
    max_rate: float = _option(_LIMITS.rate, "calls a second; 0 for no limit", float)
    max_queue_seconds: float = _option(
        60.0, "estimated engine time of one tenant's calls in flight", float
    )
    max_pending_bytes: int | None = _option(
        None,
        "arriving messages, batches and answers in flight (default: a quarter of the memory)",
        parse_bytes,
    )
    lease_seconds: float = _option(86_400.0, "an unused data set is removed after this time", float)
    insecure: bool = _option(False, "allow plain text on a network", parse_switch)
    tls_cert: str = _option("", "file with the certificate chain; switches TLS on")
    tls_key: str = _option("", "file with the certificate's key")
    tls_client_ca: str = _option("", "file with the authorities of client certificates, required")
    token_file: str = _option("", "file with the hashes of bearer tokens, required then")
    tenants_file: str = _option("", "file with limits of tenants (TOML)")

    @property
    def front_ends(self) -> int:
        """Number of front-end processes, the main process included."""
        return self.front_doors or max(1, min(_MOST_FRONT_ENDS, available_cores() - 1))

    @property
    def connections(self) -> int:
        """Most connections of one front-end process."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.max_connections or min(_MOST_CONNECTIONS, int(files * _CONNECTIONS_PART))

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
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    @classmethod
    def from_arguments(
        cls, arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> Config:
        """Read flags and variables; print help or an error and exit where they are wrong."""
        parser = argparse.ArgumentParser(
            prog="warpfit serve",
            usage="warpfit serve [--setting VALUE ...]",  # naming all flags would hide an error
            description="Serve expression evaluation over gRPC.",
            epilog="Each flag --some-name may also be set as WARPFIT_SOME_NAME. Sizes may be "
            "written like 256MiB.",
        )
        for setting in fields(cls):
            _add_flag(parser, setting, environment)
        return cls(**vars(parser.parse_args(arguments)))


def _add_flag(
    parser: argparse.ArgumentParser, setting: Any, environment: Mapping[str, str]
) -> None:
    metadata, variable = setting.metadata, f"WARPFIT_{setting.name.upper()}"
    default = environment.get(variable, setting.default)
    if metadata["choices"] and metadata["parse"](default) not in metadata["choices"]:
        parser.error(f"{variable} must be one of {metadata['choices']}")
    is_switch = metadata["parse"] is parse_switch  # whose flag needs no value
    switch: dict[str, Any] = {"nargs": "?", "const": True} if is_switch else {}
    parser.add_argument(
        "--" + setting.name.replace("_", "-"),
        default=default,
        type=_with_reason(metadata["parse"]),
        choices=metadata["choices"],
        help=metadata["help"] + ("" if default in (None, "") else " (default: %(default)s)"),
        metavar=None if metadata["choices"] else setting.name.split("_")[-1].upper(),
        **switch,
    )


def _with_reason(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print the text of a ValueError, which it replaces by one of its own."""
    if parse in (int, float, str):  # for these argparse's own text says enough
        return parse

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
