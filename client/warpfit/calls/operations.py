"""Operations of a client: send a checked request to servers and return its result.

All decisions are made here and in `Attempts`: what to encode, which server to call, when to retry,
when to upload again. Messages go through a `Transport`, which `warpfit.testing` has without a
network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

from warpfit import codec
from warpfit.calls import splitting
from warpfit.calls.attempts import Attempts, T
from warpfit.calls.batches import PopulationCache
from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.calls.progress import Progress, silent
from warpfit.calls.retries import Deadline, Retries
from warpfit.calls.splitting import R, S, SearchProgress, problem_of, searches
from warpfit.dataset import ClientDataset, Layout, ServerFile, warn_of_lost_digits
from warpfit.errors import DatasetNotFoundError, ProgramError, ResourceExhaustedError, WarpfitError
from warpfit.expressions.printing import locate
from warpfit.fitting import FitProgress, FitRequest, FitResult
from warpfit.ir import Batch
from warpfit.request import Evaluation, Result
from warpfit.server_info import ServerInfo
from warpfit.transport.call import Call, Cancellation, Transport
from warpfit.transport.connection import Connection
from warpfit.transport.servers import Server, Servers

#: Longest time in seconds that a server may take to release a data set where it is not a must.
_RELEASE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ClientOperations:
    """Carries out the requests of a client; threads may share it."""

    attempts: Attempts
    batches: PopulationCache = field(default_factory=PopulationCache)
    limits: splitting.KnownLimits = field(default_factory=splitting.KnownLimits)

    @classmethod
    def of(cls, transport: Transport, connection: Connection) -> Self:
        """Make the operations of a new client."""
        addresses, replicas = connection.target.addresses, connection.replicas
        servers = Servers(addresses, replicas=replicas, is_fixed=bool(addresses))
        return cls(Attempts(transport, connection, servers))

    def under(self, cancellation: Cancellation) -> Self:
        """Return the same operations, but that ``cancellation`` ends what they do."""
        return replace(self, attempts=replace(self.attempts, cancellation=cancellation))

    def make_resident(self, dataset: ClientDataset, report: Progress) -> None:
        """Make a data set resident; send nothing but a question if it already is."""
        retries = self._retries(None)
        attempts, done = self.attempts, list[Server]()

        def make_resident(server: Server) -> None:
            self._make_resident(server, dataset, retries, silent if done else report)
            done.append(server)

        attempts.anywhere(make_resident, retries, dataset)
        if attempts.servers.is_several:
            homes = attempts.servers.homes(dataset.content_id, dataset.layout.nbytes)
            asked = [*done, *(one for one in homes if dataset.content_id in one.refusals)]
            others = [server for server in homes if server not in asked]
            attempts.at_each(others, make_resident, retries.deadline)

    def open(self, file: ServerFile) -> ClientDataset:
        """Have a server read a data set from a file of its own."""
        answer = self._somewhere(Call("OpenDataset", codec.open_message(file)), self._retries(None))
        opened = codec.opened_dataset(answer, file)
        warn_of_lost_digits(codec.printable(answer.lost_digits))
        return opened

    def evaluate(self, request: Evaluation, data: DatasetHandle, deadline: Deadline) -> Result:
        """Evaluate expressions; upload the data set again where a server does not have it."""

        def in_parts(own: ClientOperations, part: Evaluation) -> Result:
            def evaluate(part: Evaluation) -> Result:
                read = partial(codec.read_result, part, data.layout)
                is_single = not (part.values or part.jacobian)
                call = Call("Evaluate", codec.evaluation_to_bytes(part), read, is_single)
                result: Result = own._on_data(call, deadline, data, part)
                return result

            return own._in_parts(part, data.layout, evaluate)

        return self._over_servers("Evaluate", request, data, in_parts)

    def fit(
        self,
        request: FitRequest,
        data: DatasetHandle,
        deadline: Deadline,
        report: Callable[[FitProgress], None] | None,
    ) -> FitResult:
        """Fit parameters; upload the data set again where a server does not have it."""
        progress = SearchProgress(request, report)

        def in_parts(own: ClientOperations, part: FitRequest) -> FitResult:
            return own._fit(data, part, progress, deadline)

        return self._over_servers("Optimize", request, data, in_parts)

    def release(self, data: DatasetHandle, *, everywhere: bool) -> None:
        """Give a data set back, or remove it for all; nothing happens where it is not resident."""
        dataset = checked_handle(data).dataset
        call = Call("ReleaseVariables", codec.release_message(dataset, everywhere=everywhere))
        servers = self.attempts.servers
        if everywhere and not servers.is_several:
            with suppress(DatasetNotFoundError):
                self._somewhere(call, self._retries(None))
            return

        def release(server: Server) -> None:
            with suppress(DatasetNotFoundError):
                self.attempts.call(server, call, _RELEASE_SECONDS)

        # What a server holds that is away is evicted some time. So a caller that has done its work
        # does not wait for a server only to tell it that.
        homes = servers.homes(data.content_id, data.layout.nbytes)
        self.attempts.at_each(homes, release, Deadline(None))

    def wait_ready(self, timeout: float) -> ServerInfo:
        """Ask until a server answers, for ``timeout`` seconds whatever the retry policy says."""
        connection = self.attempts.connection
        policy = replace(connection.retry, total_seconds=math.inf)
        patient = replace(connection, retry=policy, wait=math.inf)
        return replace(self, attempts=replace(self.attempts, connection=patient)).info(timeout)

    def info(self, timeout: float | None) -> ServerInfo:
        """Ask for version, engine, devices, limits and operators."""
        call = Call("GetServerInfo", codec.info_request())
        return codec.info_from_message(self._somewhere(call, self._retries(timeout)))

    def _fit(
        self, data: DatasetHandle, request: FitRequest, progress: SearchProgress, deadline: Deadline
    ) -> FitResult:
        left = searches(request)

        def fit(part: FitRequest) -> FitResult:
            nonlocal left
            share = searches(part) / left
            within = deadline.part(share) if part.settings.partial else deadline
            read = partial(codec.read_fit, part, report=progress.of_part(part))
            is_single = not part.settings.progress
            call = Call("Optimize", codec.fit_to_message(part), read, is_single)
            result: FitResult = self._on_data(call, within, data, part)
            left -= searches(part)
            progress.finish(part)
            return result

        return self._in_parts(request, data.layout, fit)

    def _over_servers(
        self, method: str, request: R, data: DatasetHandle, call: Callable[[Self, R], S]
    ) -> S:
        """Call with a request, or with parts of a large one at the same time."""
        servers, count = self.attempts.servers, 1
        if servers.is_several:
            work = problem_of(request).token_rows(data.layout)
            count = servers.parts(method, work, data.content_id, data.layout.nbytes)
        if count == 1:
            return call(self, request)
        bounds = splitting.even_bounds(splitting.program_weights(request), count)
        parts = zip(splitting.split(request, bounds), bounds, strict=False)
        with Cancellation().within(self.attempts.cancellation) as cancellation:
            own = self.under(cancellation)
            with ThreadPoolExecutor(count) as pool:
                calls = [
                    pool.submit(_placed, partial(call, own, part), start) for part, start in parts
                ]
                try:
                    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
                    for ended in done:
                        ended.result()  # raises what a part has failed with
                finally:
                    cancellation.cancel()
                return splitting.join([ended.result() for ended in calls])

    def _in_parts(self, request: R, layout: Layout, call: Callable[[R], S]) -> S:
        """Call with a request, or with parts of it where the server refuses it as too large."""
        bounds = self.limits.bounds(request, layout)
        if len(bounds) == 2:
            try:
                return call(request)
            except ResourceExhaustedError as error:
                bounds = self.limits.learn(error, request, layout)
        results = []
        for start, part in zip(bounds, splitting.split(request, bounds), strict=False):
            results.append(_placed(partial(self._in_parts, part, layout, call), start))
        return splitting.join(results)

    def _on_data(
        self, call: Call, deadline: Deadline, data: DatasetHandle, part: Evaluation | FitRequest
    ) -> Any:
        """Call a method that needs a data set at a server that has it or is sent it."""
        retries = Retries(self.attempts.connection.retry, deadline)
        problem = problem_of(part)
        work = problem.token_rows(data.layout) if self.attempts.servers.is_several else 0

        def at(server: Server) -> Any:
            return self.attempts.on_data(server, call, retries, data.dataset, work)

        try:
            return self.attempts.anywhere(at, retries, data.dataset)
        except ProgramError as error:
            _add_text(error, problem.batch, data.names)
            raise

    def _make_resident(
        self, server: Server, dataset: ClientDataset, retries: Retries, report: Progress
    ) -> None:
        try:
            question = Call("GetVariables", codec.get_message(dataset))
            codec.check_dataset(dataset, self.attempts.call(server, question, None))
            report(dataset.layout.nbytes, dataset.layout.nbytes)
        except DatasetNotFoundError:
            self.attempts.send(server, dataset, retries, report)

    def _somewhere(self, call: Call, retries: Retries) -> Any:
        def at(server: Server) -> Any:
            return self.attempts.call(server, call, retries.deadline.remaining())

        return self.attempts.anywhere(at, retries)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self.attempts.connection.retry, Deadline(timeout))


def _placed(call: Callable[[], T], start: int) -> T:
    """Call with a part whose first program is number ``start`` of the whole."""
    try:
        return call()
    except WarpfitError as error:
        error.expression = None if error.expression is None else error.expression + start
        raise


def _add_text(error: ProgramError, batch: Batch, names: tuple[str, ...]) -> None:
    """Add the program's text, and the place in it, to an error that names a token."""
    index, token = error.expression, error.token
    if index is not None and token is not None and index < len(batch):
        error.text, error.position = locate(batch.program(index), token, names)
