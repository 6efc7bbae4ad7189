"""Messages between the server's processes, by sender and receiver.

Each is a frozen dataclass that is pickled, because both ends are one program. Bulk data never
travels in a message: it lies in segments of shared memory, whose file descriptors travel beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from warpfit.dataset import Layout
from warpfit.errors import WarpfitError
from warpfit.fitting import FitProgress, FitSettings
from warpfit.losses import Closing
from warpfit.request import Loss, Precision, Tier, Timings
from warpfit.server_info import Device
from warpfit_server.ipc.quarantine import Casualty, Survivor, SuspectList
from warpfit_server.ipc.segment_layout import Frame
from warpfit_server.observability.measurements import Delta

#: Outputs of an evaluation that are requested by name.
REQUESTED: Final = (
    *("gradient", "jacobian", "variable_gradient"),
    *("reductions", "linear_scaling", "correlation"),
)

#: Members of enums by their values: much faster than calling the enum.
_PRECISIONS: Final = {member.value: member for member in Precision}
_LOSSES: Final = {member.value: member for member in Loss}
_TIERS: Final = {member.value: member for member in Tier}
_CLOSINGS: Final = {member.value: member for member in Closing}

# ------------------------------------------------------------------------ supervisor -> engine


@dataclass(frozen=True, slots=True)
class Load:
    """Make the data set in a segment usable; answered by Loaded."""

    content_id: bytes
    layout: Layout
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Forget a data set."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Serve the front end whose socket comes along, once every earlier message is dealt with."""


@dataclass(frozen=True, slots=True)
class Count:
    """Answer with Counted."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


# ------------------------------------------------------------------------ engine -> supervisor


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can take work."""

    engine: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of Load."""

    content_id: bytes
    error: WarpfitError | None


@dataclass(frozen=True, slots=True)
class Counted:
    """The engine's counters by name."""

    counters: Mapping[str, float]


# ------------------------------------------------------------------------ front end -> engine


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the batch in a segment; answered by Progress..., then Finished."""

    request: int
    """Number of the request, which its answers carry."""
    segment: int
    """Identifier of the segment; its descriptor comes along the first time."""
    size: int
    """Bytes of the segment."""
    frame: Frame
    dataset_id: bytes
    rows: tuple[int, int]
    precision: Precision
    loss: Loss | None
    tier: Tier
    submitted: int
    """``time.monotonic_ns()`` of the front end."""
    closing: Closing | None = None
    """Of the caller's own loss function, whose tokens are in the segment; None without one."""
    requested: tuple[str, ...] = ()
    """Those of `REQUESTED` that are wanted."""
    tenant: str = ""
    """Whose request it is; the engine shares its time fairly among tenants."""
    request_id: str = ""
    """For the engine's log lines."""
    alone: float = 0.0
    """Seconds for which nothing may run beside it, as it may have crashed an engine; 0: no."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle flat: this is sent often, and dataclasses and enums take long."""
        return _evaluate, (
            *(self.request, self.segment, self.size, self.frame.fields(), self.dataset_id),
            *(self.rows, self.precision.value, self.loss and self.loss.value, self.tier.value),
            *(self.submitted, self.closing and self.closing.value, self.requested),
            *(self.tenant, self.request_id, self.alone),
        )


def _evaluate(
    request: int,
    segment: int,
    size: int,
    frame: tuple[Any, ...],
    dataset_id: bytes,
    rows: tuple[int, int],
    precision: str,
    loss: str | None,
    tier: str,
    submitted: int,
    closing: str | None,
    *rest: Any,
) -> Evaluate:
    return Evaluate(
        *(request, segment, size, Frame.of_fields(frame), dataset_id, rows),
        *(_PRECISIONS[precision], _LOSSES[loss] if loss else None, _TIERS[tier], submitted),
        *(_CLOSINGS[closing] if closing else None, *rest),
    )


@dataclass(frozen=True, slots=True)
class Optimize:
    """Fit the batch in a segment; answered by FitProgressed..., then Finished."""

    problem: Evaluate
    settings: FitSettings
    """Without its arrays, which are in the segment."""
    deadline: float | None
    """``time.monotonic()`` at which to stop and return what there is."""


@dataclass(frozen=True, slots=True)
class Unmap:
    """Forget a segment, which no request will name again."""

    segment: int


# ------------------------------------------------------------------------ engine -> front end


@dataclass(frozen=True, slots=True)
class Progress:
    """The values of the first programs are final."""

    request: int
    programs: int


@dataclass(frozen=True, slots=True)
class FitProgressed:
    """How far the searches are."""

    request: int
    progress: FitProgress


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine is done with a request and does not touch its segment any more."""

    request: int
    timings: Timings = field(default_factory=Timings)
    error: WarpfitError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle flat, as `Evaluate`."""
        t = self.timings
        stages = (t.decode, t.queue, t.copy_in, t.compute, t.copy_out)
        return _finished, (self.request, self.error, t.tier.value, t.cache_hits, *stages)


def _finished(
    request: int, error: WarpfitError | None, tier: str, cache_hits: int, *stages: int
) -> Finished:
    decode, queue, copy_in, compute, copy_out = stages
    timings = Timings(decode, queue, copy_in, compute, copy_out, _TIERS[tier], cache_hits)
    return Finished(request, timings, error)


# ------------------------------------------------------ further front end -> main front end


@dataclass(frozen=True, slots=True)
class Serving:
    """The front end has opened the port."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Lease a data set to the front end; answered by Found or Missing."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The front end has no connection to the engine; answered by EngineSocket if there is one."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the front end's own probe has found: whether calls that come to it are answered."""

    answers: bool


@dataclass(frozen=True, slots=True)
class Unused:
    """The front end gives a lease back."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Answer to Forget: no new call uses the data set."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the front end has measured since the last time; it also says that it lives."""

    delta: Delta


# ------------------------------------------------------ main front end -> further front end


@dataclass(frozen=True, slots=True)
class Found:
    """The data set is leased to the front end until Unused."""

    content_id: bytes
    layout: Layout


@dataclass(frozen=True, slots=True)
class Missing:
    """The data set cannot be leased."""

    content_id: bytes
    error: WarpfitError


@dataclass(frozen=True, slots=True)
class EngineSocket:
    """The front end's socket to an engine comes along."""

    engine: int
    """Number of the engine process, from 1."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The data set was released."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether calls can be answered, for health checks on the port."""

    ready: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """Take calls: the engine is ready."""

    seed: int
    """Of the question that the front end's probe asks."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Refuse new calls, let those in flight finish within the grace period, end."""


Order = Evaluate | Optimize
Event = Progress | FitProgressed | Finished
Message = (
    Load | Unload | Connect | Count | Stop | Ready | Loaded | Counted | Order | Unmap | Event
    | Lookup | Reconnect | Probed | Casualty | Survivor | Unused | Forgotten | Serving | Recorded
    | Found | Missing | EngineSocket | Forget | Readiness | SuspectList | Begin | Quit
)  # fmt: skip
