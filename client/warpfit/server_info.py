"""Description of a server: version, devices, limits, operators."""

from dataclasses import dataclass

from warpfit.request import Tier


@dataclass(frozen=True, slots=True)
class Device:
    """A device that an engine computes on."""

    name: str
    threads: int = 0
    """Threads of a CPU engine; 0 for a GPU."""
    memory: int = 0
    """Bytes."""
    compute_capability: str = ""
    """CUDA, such as ``"9.0"``."""
    driver: str = ""
    """CUDA driver version."""
    tiers: tuple[Tier, ...] = (Tier.INTERPRETER,)
    """Tiers that the engine offers on this device."""
    label: str = ""
    """Names the device in metrics and timings, such as ``"cuda:0"``."""
    serving: bool = True
    """Whether its engine has just answered a health probe rightly."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds that a server enforces; a call above one fails with RESOURCE_EXHAUSTED."""

    message_bytes: int = 64 << 20
    """Size of one message to the server."""
    dataset_bytes: int = 8 << 30
    """Size of one data set."""
    resident_bytes: int = 16 << 30
    """Size of all resident data sets."""
    programs: int = 100_000
    """Programs in a batch."""
    tokens: int = 5_000_000
    """Tokens in a batch."""
    program_tokens: int = 10_000
    """Tokens in a program."""
    vectors: int = 10_000
    """Parameter vectors for each program."""
    result_bytes: int = 4 << 30
    """Size of one answer."""
    requests: int = 64
    """Calls in flight."""
    rows: int = 1 << 40
    """Rows of a data set."""
    rate: float = 0.0
    """Calls a second, in bursts of at most a second's; 0 for no limit."""
    loss_tokens: int = 256
    """Tokens in a custom loss function."""
    names: int = 65_536
    """Variable names of a data set."""
    name_bytes: int = 1 << 20
    """Size of all variable names of a data set as UTF-8."""


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """One operator of the server's operator table."""

    code: int
    name: str
    arity: int
    symbol: str
    notes: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Answer to GetServerInfo."""

    version: str
    engine: str
    """``"cpu"`` or ``"cuda"``."""
    devices: tuple[Device, ...]
    limits: Limits
    operators: tuple[OperatorInfo, ...]
    datasets: int = 0
    """Resident data sets of the caller's tenant."""
