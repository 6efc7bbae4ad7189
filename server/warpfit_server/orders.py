"""Evaluations and fits on their way to the engine.

Most evaluations are *plain*: for losses alone. Those of one client differ in their batch only, and
travel as packets that compiled code can read: numbers that tell where the batch lies, and text that
tells the *kind* of evaluation. Whoever has answered one of a kind can answer the next one without
reading the text. Everything else is pickled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.fitting import FitSettings
from warpfit.losses import Closing
from warpfit.request import Loss, Precision, Tier
from warpfit_server.frame import Frame

#: Wishes of an evaluation that travel by name.
WISHES: Final = (
    *("gradient", "jacobian", "variable_gradient"),
    *("reductions", "linear_scaling", "correlation"),
)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """On a lane: evaluate the batch in its segment; answered by Progress..., then Finished."""

    size: int
    """Bytes of the segment that comes along, which is the lane's from now on; 0 without one."""
    keep: bool
    """Whether the lane's next evaluation may use the segment again."""
    frame: Frame
    dataset_id: bytes
    rows: tuple[int, int]
    precision: Precision
    loss: Loss | None
    tier: Tier
    submitted: int
    """``time.monotonic_ns()`` of the front door."""
    closing: Closing | None = None
    """Of the caller's own loss function, whose tokens are in the segment; None without one."""
    wishes: tuple[str, ...] = ()
    """Names of the other wishes of the evaluation that are true."""
    tenant: str = ""
    """On whose behalf; the engine shares its time fairly among tenants."""
    request_id: str = ""
    """For the engine's log lines."""
    urgent: bool = False
    """Whether it runs at once, beside the evaluations that are running: a probe."""
    alone: float = 0.0
    """Seconds for which nothing may run beside it, as it may have crashed an engine; 0: no."""

    @property
    def is_plain(self) -> bool:
        """Whether it wants built-in losses alone, in the segment that the lane has kept."""
        wants_losses = self.loss is not None and self.frame.is_small
        is_usual = not (self.wishes or self.urgent or self.alone)
        return wants_losses and is_usual and self.keep and not self.size

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle flat: this is sent often, and dataclasses and enums take long."""
        return _evaluate, (
            *(self.size, self.keep, self.frame, self.dataset_id, self.rows),
            *(self.precision.value, self.loss and self.loss.value, self.tier.value),
            *(self.submitted, self.closing and self.closing.value, self.wishes, self.tenant),
            *(self.request_id, self.urgent, self.alone),
        )


def _evaluate(
    size: int,
    keep: bool,
    frame: Frame,
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
        *(size, keep, frame, dataset_id, rows, Precision(precision)),
        *(Loss(loss) if loss else None, Tier(tier), submitted),
        *(Closing(closing) if closing else None, *rest),
    )


@dataclass(frozen=True, slots=True)
class Optimize:
    """On a lane: fit the batch in its segment; answered by FitProgressed..., then Finished."""

    problem: Evaluate
    settings: FitSettings
    """Without its arrays, which are in the segment."""
    deadline: float | None
    """``time.monotonic()`` at which to stop and return what there is."""


Order = Evaluate | Optimize

# -------------------------------------------------------------------------- plain packets

#: First byte of a packet; others begin with another one.
PLAIN: Final = 2


class Numbers(NamedTuple):
    """Beginning of a packet: 64-bit integers, one after the other."""

    mark: int
    """`PLAIN`."""
    kind_bytes: int
    """Length of the text that follows; the rest of the packet is the request's id."""
    submitted: int
    """``time.monotonic_ns()`` of the front door."""
    tokens: int
    programs: int
    parameters: int
    vectors: int
    values_at: int
    """Where the arrays of `warpfit_server.frame.Frame` begin in the segment."""
    parameters_at: int
    lengths_at: int
    counts_at: int
    codes_at: int
    losses_at: int


_NUMBERS: Final = struct.Struct(f"={len(Numbers._fields)}q")
NUMBERS_BYTES: Final = _NUMBERS.size


def plain_packet(order: Evaluate) -> bytes:
    """Write a plain evaluation down."""
    frame, (start, stop) = order.frame, order.rows
    assert order.loss is not None
    kind = (
        f"{order.dataset_id.hex()} {start} {stop} {frame.rows} {frame.dtype.str} "
        f"{order.precision.value} {order.loss.value} {order.tier.value} {order.tenant}"
    ).encode()
    numbers = Numbers(
        *(PLAIN, len(kind), order.submitted),
        *(frame.tokens, frame.programs, frame.parameters, frame.vectors, *frame.places()),
    )
    return b"".join((_NUMBERS.pack(*numbers), kind, order.request_id.encode()))


def read_plain(packet: memoryview) -> Evaluate:
    """Read a plain evaluation."""
    numbers = Numbers(*_NUMBERS.unpack_from(packet))
    end = NUMBERS_BYTES + numbers.kind_bytes
    kind = str(packet[NUMBERS_BYTES:end], "utf-8").split(" ", 8)
    dataset, start, stop, rows, dtype, precision, loss, tier, tenant = kind
    return Evaluate(
        size=0,
        keep=True,
        frame=Frame(
            *(numbers.tokens, numbers.programs, numbers.parameters, numbers.vectors),
            *(int(rows), np.dtype(dtype)),
            values=False,
            losses=True,
        ),
        dataset_id=bytes.fromhex(dataset),
        rows=(int(start), int(stop)),
        precision=Precision(precision),
        loss=Loss(loss),
        tier=Tier(tier),
        submitted=numbers.submitted,
        tenant=tenant,
        request_id=str(packet[end:], "utf-8"),
    )
