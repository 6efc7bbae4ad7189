"""The operations of a client, without input or output; the blocking and asyncio clients run them.

An operation is a generator. It yields actions; the client performs each one, blocking or awaiting,
and throws a failed action's `WarpfitError` back in. All decisions are made here: what to encode,
when to retry, when to upload again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

from warpfit import codec
from warpfit.calls.arguments import EvaluateOptions, UploadOptions, build_dataset, build_evaluation
from warpfit.calls.batches import BatchCache, Parameters
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.fit_arguments import FitOptions, build_fit
from warpfit.calls.progress import Progress, reporter, silent
from warpfit.calls.results import Answer, Fit
from warpfit.calls.retries import Deadline, Retries
from warpfit.calls.splitting import KnownLimits, PartProgress, R, S, join, split
from warpfit.dataset import Dataset, Layout
from warpfit.errors import (
    DatasetNotFoundError,
    ProgramError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
)
from warpfit.expressions.printing import locate
from warpfit.fitting import FitRequest, FitResult
from warpfit.ir import Batch
from warpfit.request import Evaluation, Result
from warpfit.server_info import ServerInfo
from warpfit.transport.call import Call, Collector, UnaryCollector, UploadStream
from warpfit.transport.settings import ClientConfig

#: How often one operation uploads a data set again that the server has evicted meanwhile.
_MOST_UPLOADS: Final = 3
T = TypeVar("T")
C = TypeVar("C", bound=Collector)


@dataclass(frozen=True, slots=True)
class Sleep:
    """Action: wait."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Action: call a function that takes so long that it would block an event loop."""

    function: Callable[[], Any]


Action: TypeAlias = Call | Sleep | Compute
#: Yields actions, is sent what a `Compute` returned (None for the others), returns its result.
Operation: TypeAlias = Generator[Action, Any, T]
#: Makes the request and the collector of one attempt.
Attempt: TypeAlias = Callable[[], tuple[Any, C]]


@dataclass(frozen=True, slots=True)
class ClientOperations:
    """Every operation that a client offers; `warpfit.Client` describes them."""

    config: ClientConfig
    batches: BatchCache = field(default_factory=BatchCache)
    limits: KnownLimits = field(default_factory=KnownLimits)

    def upload(self, X: Any, y: Any, weights: Any, options: UploadOptions) -> Operation[Dataset]:
        """Make a data set resident; send nothing but a question if it already is."""
        dataset: Dataset = yield Compute(
            lambda: build_dataset(
                X, y, weights, names=options.get("names"), dtype=options.get("dtype", "float32")
            )
        )
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
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters,
        values: bool | None,
        options: EvaluateOptions,
    ) -> Operation[Answer]:
        """Evaluate expressions; upload the data set again if the server does not have it."""
        deadline = Deadline(options.get("timeout"))
        evaluation, leading_axis = build_evaluation(
            data, expressions, parameters, values, options, self.batches
        )

        def evaluate(part: Evaluation) -> Operation[Result]:
            message = codec.evaluation_to_bytes(part)

            def attempt() -> tuple[Any, codec.ResultAssembler]:
                return message, codec.ResultAssembler(part)

            batch = part.batch
            collector = yield from self._on_data("Evaluate", attempt, deadline, data, batch)
            return collector.result()

        result = yield from self._in_parts(evaluation, data.layout, evaluate)
        return Answer.of(result, evaluation.batch, leading_axis=leading_axis)

    def optimize(
        self, data: DatasetHandle, expressions: Any, parameters: Parameters, options: FitOptions
    ) -> Operation[Fit]:
        """Fit parameters; upload the data set again if the server does not have it."""
        deadline = Deadline(options.get("timeout"))
        request = build_fit(data, expressions, parameters, options, self.batches)
        searches = PartProgress.of(request, options.get("progress"))

        def fit(part: FitRequest) -> Operation[FitResult]:
            message, batch = codec.fit_to_message(part), part.problem.batch
            share = searches.share(part)
            within = deadline.part(share) if part.settings.partial else deadline

            def attempt() -> tuple[Any, codec.FitAssembler]:
                return message, codec.FitAssembler(part, searches.reporter(part))

            collector = yield from self._on_data("Optimize", attempt, within, data, batch)
            searches.finish(part)
            return collector.result()

        result = yield from self._in_parts(request, data.layout, fit)
        return Fit.of(result, request.problem.batch, all_starts=request.settings.all_starts)

    def release(self, data: DatasetHandle) -> Operation[None]:
        """Release a data set; nothing happens if it is not resident."""
        try:
            message = codec.release_message(data.dataset)
            yield from self._unary("ReleaseVariables", message, Deadline(None))
        except DatasetNotFoundError:
            return

    def wait_ready(self, timeout: float) -> Operation[ServerInfo]:
        """Ask until the server answers, for ``timeout`` seconds whatever the retry policy says."""
        policy = replace(self.config.retry, total_seconds=math.inf)
        return ClientOperations(replace(self.config, retry=policy)).info(timeout)

    def info(self, timeout: float | None) -> Operation[ServerInfo]:
        """Ask for version, engine, devices, limits and operators."""
        message = yield from self._unary("GetServerInfo", codec.info_request(), Deadline(timeout))
        return codec.info_from_message(message)

    def _in_parts(
        self, request: R, layout: Layout, call: Callable[[R], Operation[S]]
    ) -> Operation[S]:
        """Call with a request, or with parts of it where the server refuses it as too large."""
        bounds = self.limits.bounds(request, layout)
        if len(bounds) == 2:
            try:
                return (yield from call(request))
            except ResourceExhaustedError as error:
                bounds = self.limits.learn(error, request, layout)
        results = []
        for start, part in zip(bounds, split(request, bounds), strict=False):
            try:
                results.append((yield from self._in_parts(part, layout, call)))
            except WarpfitError as error:
                error.expression = None if error.expression is None else error.expression + start
                raise
        return join(results)

    def _on_data(
        self,
        method: str,
        attempt: Attempt[C],
        deadline: Deadline,
        data: DatasetHandle,
        batch: Batch,
    ) -> Operation[C]:
        """Call a method that needs a data set, and upload the data set if it is not resident."""
        uploads = 0
        while True:
            try:
                return (yield from self._retried(method, attempt, deadline))
            except DatasetNotFoundError:
                uploads += 1
                if uploads > _MOST_UPLOADS:
                    raise
                yield from self._send(data.dataset, deadline, silent)
            except ProgramError as error:
                _add_text(error, batch, data.names)
                raise

    def _send(self, dataset: Dataset, deadline: Deadline, report: Progress) -> Operation[None]:
        chunk_bytes = self.config.transport.chunk_bytes

        def attempt() -> tuple[UploadStream, UnaryCollector]:
            return UploadStream(dataset, chunk_bytes, report), UnaryCollector()

        yield from self._retried("UploadVariables", attempt, deadline)

    def _unary(self, method: str, request: Any, deadline: Deadline) -> Operation[Any]:
        collector = yield from self._retried(method, lambda: (request, UnaryCollector()), deadline)
        return collector.message

    def _retried(self, method: str, attempt: Attempt[C], deadline: Deadline) -> Operation[C]:
        retries = Retries(self.config.retry, deadline)
        while True:
            request, collector = attempt()
            try:
                yield Call(method, request, collector, deadline.remaining())
            except (UnavailableError, ResourceExhaustedError) as error:
                if isinstance(error, ResourceExhaustedError) and error.retry_after is None:
                    raise  # over a limit: the server would refuse it again
                yield Sleep(retries.pause_after(error))
            else:
                return collector


def _add_text(error: ProgramError, batch: Batch, names: tuple[str, ...]) -> None:
    """Add the program's text, and the place in it, to an error that names a token."""
    index, token = error.expression, error.token
    if index is not None and token is not None and index < len(batch):
        error.text, error.position = locate(batch.program(index), token, names)
