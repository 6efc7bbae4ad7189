"""What a client does, without input or output: operations that both clients drive.

An operation is a generator. It yields steps, its driver performs each one (blocking or awaiting),
and throws a failed step's `WarpfitError` back in. All decisions are made here: what to encode, when
to retry, when to upload again. The drivers in `warpfit.client` and `warpfit.aio` make none.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from warpfit import codec
from warpfit.calls.arguments import (
    EvaluateOptions,
    Parameters,
    UploadOptions,
    build_evaluation,
    canonical,
)
from warpfit.calls.data import Answer, Data, Fit
from warpfit.calls.fit_arguments import FitOptions, build_fit
from warpfit.calls.info import ServerInfo
from warpfit.calls.progress import Progress, reporter, silent
from warpfit.calls.token_cache import RecentTokens
from warpfit.dataset import Dataset
from warpfit.errors import (
    DatasetNotFoundError,
    DeadlineExceededError,
    InvalidArgumentError,
    ProgramError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
)
from warpfit.ir import Batch
from warpfit.transport.settings import ClientConfig, RetryPolicy

#: How often one operation uploads a data set again that others' uploads have pushed out.
_UPLOADS: Final = 3
T = TypeVar("T")
C = TypeVar("C", bound="Collector")
#: Makes request and collector of one attempt.
Attempt: TypeAlias = Callable[[], tuple[Any, C]]


class Collector(Protocol):
    """Takes the messages of an answer, one by one, while later ones are on their way."""

    @property
    def is_single(self) -> bool:
        """Whether the contract promises that the answer is one message."""

    def add(self, message: Any) -> None:
        """Take the next message."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Step: one remote call, without retries."""

    method: str
    """Name of the method in evaluator.proto."""
    request: Any
    """The message, or an iterable of messages where the contract says stream."""
    collector: Collector
    timeout: float | None
    """Seconds, or None to wait for ever."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Step: wait."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Step: compute something that takes long enough to stand in the way of an event loop."""

    function: Callable[[], Any]


Step: TypeAlias = Call | Sleep | Work
#: Yields steps, is sent what a `Work` returned (None for the others), returns its result.
Operation: TypeAlias = Generator[Step, Any, T]


class Single:
    """Collects the only message of a unary answer."""

    is_single = True

    def __init__(self) -> None:
        self.message: Any = None

    def add(self, message: Any) -> None:
        """Take the message."""
        self.message = message


class Outgoing:
    """The messages of an upload, as an iterator; keeps a failure of the user's progress callback.

    gRPC iterates in a thread of its own, where an exception would be lost. So a failure ends the
    stream, and the transport raises it in the caller's thread.

    Args:
        dataset: to send.
        chunk_bytes: of the payload in each message.
        report: told how far it is.

    """

    def __init__(self, dataset: Dataset, chunk_bytes: int, report: Progress) -> None:
        self.failure: Exception | None = None
        self._messages = self._stream(dataset, chunk_bytes, report)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._messages)

    def _stream(self, dataset: Dataset, chunk_bytes: int, report: Progress) -> Iterator[bytes]:
        """Yield each message, and report it when the next one is asked for."""
        total = dataset.layout.nbytes
        try:
            for sent, message in enumerate(codec.upload_messages(dataset, chunk_bytes)):
                yield message
                report(min(sent * chunk_bytes, total), total)
        except Exception as error:  # whatever the user's callback raises
            self.failure = error


class Deadline:
    """A moment that all attempts of an operation share."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not timeout > 0:
            raise InvalidArgumentError(
                f"timeout {timeout} is not positive",
                "BAD_TIMEOUT",
                "Give seconds, or None to wait for ever",
                "timeout",
            )
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds left, not below 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


@dataclass(slots=True)
class Retries:
    """Counts the failed attempts of one call and decides about the next."""

    policy: RetryPolicy
    deadline: Deadline
    failures: int = 0
    first_failure: float = 0.0

    def pause_after(self, error: WarpfitError) -> float:
        """Seconds to wait before the next attempt: the policy's pause, or as the server asked.

        Raises:
            WarpfitError: ``error``, once the policy's time is used up or the server asks for more.
            DeadlineExceededError: if the caller's deadline comes before the next attempt.

        """
        now = time.monotonic()
        self.first_failure = self.first_failure if self.failures else now
        self.failures += 1
        patience = self.first_failure + self.policy.total_seconds - now
        asked = self._asked(error)
        if patience <= 0 or asked > patience:
            raise error
        pause = max(asked, min(patience, self.policy.pause(self.failures, random.random())))
        remaining = self.deadline.remaining()
        if remaining is not None and pause >= remaining:
            raise DeadlineExceededError(
                f"no answer within {self.deadline.timeout:g} s; the last of {self.failures} "
                f"attempts failed: {error.message}",
                "DEADLINE_EXCEEDED",
                "Raise timeout=, and look at the server's log",
            ) from error
        return pause

    def _asked(self, error: WarpfitError) -> float:
        """Least time that the server wants to be left alone, spread so that workers come apart."""
        spread = 1.0 + self.policy.jitter * random.random()
        return (error.retry_after or 0.0) * spread


@dataclass(frozen=True, slots=True)
class Operations:
    """Every operation that a client offers."""

    config: ClientConfig
    recent: RecentTokens = field(default_factory=RecentTokens)
    """Programs that the client has sent before."""

    def upload(
        self,
        X: Any,
        y: Any,
        weights: Any,
        options: UploadOptions,
    ) -> Operation[Dataset]:
        """Make a data set resident; sends nothing but a question if it is already."""
        dataset: Dataset = yield Work(lambda: _prepare(X, y, weights, options))
        deadline = Deadline(None)
        with reporter(options.get("progress")) as report:
            try:
                yield from self._unary("GetVariables", codec.get_message(dataset), deadline)
                report(dataset.layout.nbytes, dataset.layout.nbytes)
            except DatasetNotFoundError:
                yield from self._send(dataset, deadline, report)
        return dataset

    def run(
        self,
        data: Data,
        expressions: Any,
        parameters: Parameters,
        values: bool | None,
        options: EvaluateOptions,
    ) -> Operation[Answer]:
        """Evaluate; uploads the data set again if the server does not have it."""
        deadline = Deadline(options.get("timeout"))
        evaluation, leading_axis = build_evaluation(
            data, expressions, parameters, values, options, self.recent
        )
        message = codec.evaluation_to_bytes(evaluation)

        def attempt() -> tuple[Any, codec.ResultAssembler]:
            return message, codec.ResultAssembler(evaluation)

        batch = evaluation.batch
        answered = yield from self._on_data("Evaluate", attempt, deadline, data, batch)
        return Answer.of(answered.result(), batch, leading_axis=leading_axis)

    def optimize(
        self, data: Data, expressions: Any, parameters: Parameters, options: FitOptions
    ) -> Operation[Fit]:
        """Fit; uploads the data set again if the server does not have it."""
        deadline = Deadline(options.get("timeout"))
        request = build_fit(data, expressions, parameters, options, self.recent)
        batch = request.problem.batch
        message = codec.fit_to_message(request)

        def attempt() -> tuple[Any, codec.FitAssembler]:
            return message, codec.FitAssembler(request, options.get("progress"))

        answered = yield from self._on_data("Optimize", attempt, deadline, data, batch)
        return Fit.of(answered.result(), batch, all_starts=request.settings.all_starts)

    def release(self, data: Data) -> Operation[None]:
        """Give a data set back; one that is not resident needs no release."""
        try:
            yield from self._unary("ReleaseVariables", codec.release_message(data.dataset))
        except DatasetNotFoundError:
            return

    def wait_ready(self, timeout: float) -> Operation[ServerInfo]:
        """Ask until the server answers, for ``timeout`` seconds whatever the retry policy says."""
        policy = replace(self.config.retry, total_seconds=math.inf)
        patient = Operations(replace(self.config, retry=policy))
        return patient.info(timeout)

    def info(self, timeout: float | None) -> Operation[ServerInfo]:
        """Ask for version, engine, devices, limits and operators."""
        message = yield from self._unary("GetServerInfo", codec.info_request(), Deadline(timeout))
        return codec.info_from_message(message)

    def _on_data(
        self, method: str, attempt: Attempt[C], deadline: Deadline, data: Data, batch: Batch
    ) -> Operation[C]:
        """Use a data set; upload it again if it is not there, which under pressure may repeat."""
        uploads = 0
        while True:
            try:
                return (yield from self._retried(method, attempt, deadline))
            except DatasetNotFoundError:
                uploads += 1
                if uploads > _UPLOADS:
                    raise
                yield from self._send(data.dataset, deadline, silent)
            except ProgramError as error:
                _point_into(error, batch, data.names)
                raise

    def _send(self, dataset: Dataset, deadline: Deadline, report: Progress) -> Operation[None]:
        chunk_bytes = self.config.transport.chunk_bytes

        def attempt() -> tuple[Outgoing, Single]:
            return Outgoing(dataset, chunk_bytes, report), Single()

        yield from self._retried("UploadVariables", attempt, deadline)

    def _unary(self, method: str, request: Any, deadline: Deadline | None = None) -> Operation[Any]:
        single = yield from self._retried(
            method, lambda: (request, Single()), deadline or Deadline(None)
        )
        return single.message

    def _retried(self, method: str, attempt: Attempt[C], deadline: Deadline) -> Operation[C]:
        retries = Retries(self.config.retry, deadline)
        while True:
            request, collector = attempt()
            try:
                yield Call(method, request, collector, deadline.remaining())
            except (UnavailableError, ResourceExhaustedError) as error:
                if isinstance(error, ResourceExhaustedError) and error.retry_after is None:
                    raise  # over a limit: it would be refused again
                yield Sleep(retries.pause_after(error))
            else:
                return collector


def _point_into(error: ProgramError, batch: Batch, names: tuple[str, ...]) -> None:
    """Add the program's text, and the place in it, to an error that names a token."""
    index, token = error.expression, error.token
    if index is not None and token is not None and index < len(batch):
        from warpfit.expressions.printing import locate

        error.text, error.position = locate(batch.program(index), token, names)


def _prepare(X: Any, y: Any, weights: Any, options: UploadOptions) -> Dataset:
    dataset = canonical(
        X, y, weights, names=options.get("names"), dtype=options.get("dtype", "float32")
    )
    dataset.content_id  # noqa: B018 (hashed here, where it may take long, and kept)
    return dataset
