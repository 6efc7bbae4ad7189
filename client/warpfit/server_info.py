"""Description of a server: version, devices, limits, operators."""

from dataclasses import dataclass

from warpfit.display import Shown, TextTable
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
    searches: int = 16
    """Searches at the same time."""


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """One operator of the server's operator table."""

    code: int
    name: str
    arity: int
    symbol: str
    notes: str


@dataclass(frozen=True, slots=True, repr=False)
class ServerInfo(Shown):
    """Answer to GetServerInfo; it prints as a table of the devices."""

    version: str
    engine: str
    """``"cpu"`` or ``"cuda"``."""
    devices: tuple[Device, ...]
    limits: Limits
    operators: tuple[OperatorInfo, ...]
    datasets: int = 0
    """Resident data sets of the caller's tenant."""
    contract: int = 0
    """Version of the contract that the server keeps; 0 of a server from before there were any."""

    def _table(self) -> TextTable:
        rows = [
            (
                one.label,
                one.name,
                str(one.threads or ""),
                f"{one.memory / 2**30:.1f} GiB" if one.memory else "",
                ", ".join(one.tiers),
                "yes" if one.serving else "no",
            )
            for one in self.devices
        ]
        note = f"warpfit {self.version}, engine {self.engine}, {len(self.operators)} operators, "
        note += f"{self.datasets} data set{'' if self.datasets == 1 else 's'}"
        return TextTable(("device", "name", "threads", "memory", "tiers", "serving"), rows, note)
