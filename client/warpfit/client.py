"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from warpfit import codec
from warpfit.calls import arguments
from warpfit.calls.arguments import (
    CommonOptions,
    EvaluateOptions,
    FitOptions,
    GradientOptions,
    LossOptions,
    OpenOptions,
    Parameters,
    PopulationCache,
    ScalingOptions,
    UploadOptions,
    deadline_of,
    shows_keywords,
)
from warpfit.calls.dataset_handle import DatasetHandle, checked_handle
from warpfit.calls.proposals import (
    Proposals,
    ProposeOptions,
    ProposeTask,
    Simplification,
    SimplifyOptions,
    SimplifyTask,
    TriedSkeletons,
)
from warpfit.calls.results import Answer, Fit, Output, Values
from warpfit.calls.search import (
    SearchEndedError,
    SearchOptions,
    SearchResult,
    SearchRun,
    build_search,
)
from warpfit.dataset import warn_of_lost_digits
from warpfit.embedded import embedded_server
from warpfit.errors import (
    DatasetNotFoundError,
    DeadlineExceededError,
    InvalidArgumentError,
    ProgramError,
    UnavailableError,
    explains_keywords,
    no_attribute,
)
from warpfit.evidence import gather
from warpfit.expressions.language import locate
from warpfit.ir import Batch
from warpfit.parse import place_in
from warpfit.request import (
    Evaluation,
    FitProgress,
    FitRequest,
    FitResult,
    KnownLimits,
    Result,
    searches,
)
from warpfit.searching import SearchReason
from warpfit.server_info import ServerInfo
from warpfit.transport.call import CallingBack, Cancellation, Deadline, Request, only
from warpfit.transport.channel import GrpcTransport
from warpfit.transport.connection import (
    Address,
    Connection,
    RetryPolicy,
    TlsConfig,
    TransportConfig,
)
from warpfit.transport.failover import Failover

#: Longest time in seconds that a server may take to release a data set where it is not a must.
_RELEASE_SECONDS: Final = 5.0


#: Methods of other packages, by their names, and those of a client.
OF_OTHER_CLIENTS: Final = {
    **dict.fromkeys(("fit", "curve_fit", "minimize", "least_squares"), "optimize"),
    **dict.fromkeys(("predict", "eval", "score", "transform"), "evaluate"),
    **dict.fromkeys(("dataset", "put", "send", "load"), "upload"),
}


class UploadedDataset(DatasetHandle):
    """Handle that gives the data set back when its ``with`` block ends; see `Client.release`."""

    _client: Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.release(self)


class Client:
    """Evaluates expressions on a server; any number of threads may share it.

    ::

        with warpfit.connect("127.0.0.1:50551") as client:
            data = client.upload(X, y)
            losses = client.evaluate(data, ["x1 + p1*x2"], [[0.5]], loss="mse")

    Every method raises `warpfit.errors.WarpfitError`: UnavailableError when the server stays away
    longer than the retry policy allows, ResourceExhaustedError over one of its limits.
    """

    def __init__(
        self,
        failover: Failover,
        batches: PopulationCache | None = None,
        limits: KnownLimits | None = None,
        tried: TriedSkeletons | None = None,
    ) -> None:
        """Use `warpfit.connect`, or `warpfit.testing.client` for one without a server."""
        if not isinstance(failover, Failover):
            raise not_made_so(failover, "Client", "connect")
        self._failover = failover
        self._batches = batches or PopulationCache()
        self._limits = limits or KnownLimits()
        self._tried = tried or TriedSkeletons()

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Make a client over gRPC."""
        return cls(Failover.of(GrpcTransport(connection), connection))

    def with_cancellation(self, token: Cancellation) -> Self:
        """Return a client over the same connection whose calls ``token`` cancels."""
        failover = self._failover.with_cancellation(token)
        return type(self)(failover, self._batches, self._limits, self._tried)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the connection, a token among them; a copy connects anew."""
        return type(self).of, (self._failover.connection,)

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with the method that is meant."""
            raise no_attribute(type(self).__name__, name, dir(type(self)), OF_OTHER_CLIENTS)

    def __repr__(self) -> str:
        """Show the address, and neither a token nor files."""
        connection = self._failover.connection
        how = " with TLS" if connection.security.tls is not None else ""
        return f"<{type(self).__name__} of {connection.target.text}{how}>"

    @shows_keywords(UploadOptions, dtype="auto")
    def upload(
        self, X: Any, y: Any = None, weights: Any = None, **options: Unpack[UploadOptions]
    ) -> UploadedDataset:
        """Make a data set resident on the server; send nothing if its content is there already.

        Args:
            X: [rows, variables]: a NumPy array (also a memory map) or anything array-like, a pandas
                frame, a Polars frame, a pyarrow table, record batch, reader or iterator of these,
                anything else with Arrow's stream interface, or the path of a Parquet file. Arrays
                of a GPU (CuPy, PyTorch, JAX, DLPack) are copied to the host.
            y: target [rows], needed for losses: an array or series, or the name of a column of X.
            weights: non-negative weight of each row in losses, as ``y``.
            **options: ``x`` (names of the columns that are variables; all others by default),
                ``names`` of the variables (those of the columns by default), ``dtype``
                ("float32", "float64" or "auto", the default: float64 where float32 loses digits
                that matter, or powers of the numbers leave its range), ``progress``
                (callable(bytes_done, bytes_total), or True for a tqdm bar) and ``timeout``.

        Returns:
            A handle, which is also a context manager that gives the data set back: others that have
            uploaded the same content keep it. Of more than 32 MiB it keeps no copy but reads X
            again when the data set must be sent again, so X must not change while the handle is in
            use.

        Raises:
            InvalidArgumentError: if shapes do not fit, a column is not there, a cell is missing or
                no number, or pyarrow is needed and not installed.
            ResourceExhaustedError: if the server has no room for it.
            DeadlineExceededError: if ``timeout`` passes.
        """
        arguments.check_keywords(options, UploadOptions, "y", "weights")
        deadline = deadline_of(options.get("timeout"))
        dataset = arguments.build_dataset(X, y, weights, options)
        failover, size = self._failover, dataset.layout.nbytes
        question = codec.get_message(dataset)

        def is_resident(messages: Iterable[Any]) -> None:
            codec.check_dataset(dataset, only(messages))
            report(size, size)

        with arguments.reporter(options.get("progress")) as report:
            request = Request(
                *("GetVariables", question, is_resident),
                dataset=dataset,
                deadline=deadline,
                report=report,
            )
            failover.call_with_failover(request)
        if failover.servers.is_several:
            for server in failover.servers.homes(dataset.content_id, size):
                if server.address != request.server and dataset.content_id not in server.refusals:
                    copy = Request("GetVariables", question, dataset=dataset, deadline=deadline)
                    failover.call_if_up(server, copy)
        return UploadedDataset(dataset, self)

    @shows_keywords(OpenOptions, dtype="auto")
    def open(self, name: str, **options: Unpack[OpenOptions]) -> UploadedDataset:
        """Have the server read a data set from a Parquet file of its own (``--data-root``).

        ::

            data = client.open("2024/march.parquet", x=["a", "b"], y="z")

        Args:
            name: path of the file below the server's folder of data.
            **options: ``x`` (names of the columns that are variables; all others by default),
                ``y`` and ``weights`` (names of columns), ``dtype`` (as for `upload`, "auto" by
                default) and ``timeout``.

        Returns:
            A handle as `upload` returns it, without numbers in this process.

        Raises:
            InvalidArgumentError: if there is no such file, or it has not these columns of numbers.
            ResourceExhaustedError: if the server has no room for it.
            UnimplementedError: if the server reads no files.
            DeadlineExceededError: if ``timeout`` passes.
        """
        arguments.check_keywords(options, OpenOptions)
        deadline = deadline_of(options.get("timeout"))
        file = arguments.build_file(name, options)
        request = Request("OpenDataset", codec.open_message(file), deadline=deadline)
        answer = self._failover.call_with_failover(request)
        opened = codec.opened_dataset(answer, file)
        warn_of_lost_digits(codec.printable(answer.lost_digits))
        return UploadedDataset(opened, self)

    @overload
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[CommonOptions],
    ) -> Values: ...

    @overload
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[LossOptions],
    ) -> NDArray[np.float64]: ...

    @overload
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[GradientOptions],
    ) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]: ...

    @overload
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[ScalingOptions],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]: ...

    @overload
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Output | tuple[Output, ...]: ...

    @shows_keywords(EvaluateOptions, precision="precise", tier="auto")
    def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Any:
        """Evaluate expressions: their values, or a loss of each if ``loss=`` is given.

        Args:
            data: a handle that `upload` of this or another client has returned.
            expressions: strings, Programs, SymPy expressions, DEAP trees or gplearn programs; a
                sequence of them or a single one; a `warpfit.Population`; or a `warpfit.Batch`,
                which is sent as it is.
            parameters: for each expression one vector [n] or K vectors [K, n]; for a single
                expression its vector or vectors alone.
            **options: ``loss`` ("sse", "mse", "rmse", "mae", "r2", "nmse", "huber", ..., a
                `warpfit.LossFunction`, or a text such as ``"abs(d)^1.5"``), ``rows`` (slice or
                (start, stop)), ``precision`` ("precise" or "fast"), ``tier``, ``timeout``
                (seconds for the whole call, retries included), and further outputs:
                ``gradient``, ``linear_scaling``, ``jacobian``, ``variable_gradient``,
                ``reductions``, ``correlation``.

        Returns:
            Values [rows, expressions] in the data's dtype, or losses [expressions], float64. With
            K vectors for each expression there is a leading axis of length K. Further outputs make
            it a tuple: with ``gradient=True`` losses and a list of gradients, with
            ``linear_scaling=True`` losses, slopes and intercepts; `Answer` describes the rest.

        Raises:
            ParseError: for a string that is no expression.
            ProgramError: for an expression that does not fit the data or its parameters.
            InvalidArgumentError: for anything else that is wrong with the arguments.
            DeadlineExceededError: if ``timeout`` passes.
        """
        return self.run(data, expressions, parameters, **options).array

    @shows_keywords(EvaluateOptions, precision="precise", tier="auto")
    def run(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        *,
        values: bool | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> Answer:
        """Evaluate expressions and return an `Answer` with the server's timings.

        Arguments and errors are those of `evaluate`; ``values=True`` asks for values beside a loss.
        """
        arguments.check_keywords(options, EvaluateOptions, "parameters")
        deadline = deadline_of(options.get("timeout"))
        evaluation, leading_axis = arguments.build_evaluation(
            data, expressions, parameters, values, options, self._batches
        )

        layout = data.layout

        def send(part: Evaluation) -> Result:
            is_single = codec.is_short(part, layout)
            found: Result = self._failover.call_with_failover(
                Request(
                    "Evaluate",
                    codec.evaluation_to_bytes(part, pieces=not is_single),
                    read=lambda messages: codec.read_result(part, layout, messages),
                    is_single=is_single,
                    dataset=data.dataset,
                    deadline=deadline,
                )
            )
            return found

        with _naming_the_program(expressions, evaluation.batch, layout.names):
            result = self._limits.call_in_parts(evaluation, layout, send)
        data.warn_of_range(expressions, evaluation.batch, result)
        return Answer.of(result, evaluation.batch, leading_axis=leading_axis)

    @shows_keywords(
        FitOptions,
        precision="precise",
        tier="auto",
        loss="mse",
        method="auto",
        accuracy="screening",
        restarts=0,
        seed=0,
        missing="refuse",
    )
    def optimize(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Fit the parameters of expressions on the server, all of them at once.

        ::

            fit = client.optimize(data, ["p1*exp(p2*x1)"], [[1.0, 0.1]], loss="mse")
            fit.parameters[0], fit.loss[0], fit.reason[0]

        Args:
            data: a handle that `upload` of this or another client has returned.
            expressions: as for `evaluate`.
            parameters: for each expression one start [n] or K starts [K, n]; for a single
                expression its start or starts alone. By default every parameter starts at 1, or at
                the nearest number that its bounds allow.
            **options: ``loss`` ("mse" by default; r2 is maximised), ``method`` ("auto", "lm" or
                "bfgs"), ``accuracy`` ("screening" to compare expressions, "final" to report
                parameters), ``max_iterations`` and the tolerances of gradient, step and loss,
                which override it; ``bounds`` (lower, upper), ``fixed`` (parameters that keep their
                start), ``restarts`` (further starts that the server draws), ``seed``, ``missing``
                ("refuse" or "drop" rows without a value), ``all_starts`` (the outcome of each
                start), ``standard_errors``, ``covariance``, ``absolute_sigma`` (weights
                are inverse variances), ``evidence``, ``intervals`` and ``terms`` (how sure one may
                be of an expression), ``rows``, ``precision``, ``tier``,
                ``timeout`` (seconds for the whole call), ``partial`` (return what there is when the
                time is over), ``progress`` (called a few times a second).

        Returns:
            Parameters, losses before and after, iterations, and why each search ended. No loss is
            worse than at the start; a search that cannot begin returns its start.

        Raises:
            InvalidArgumentError: for arguments that are wrong or do not fit together.
            DeadlineExceededError: if ``timeout`` passes and ``partial`` is not set.
            UnimplementedError: if the server's engine computes no derivatives.
        """
        arguments.check_keywords(options, FitOptions, "parameters")
        deadline = deadline_of(options.get("timeout"))
        fit = arguments.build_fit(data, expressions, parameters, options, self._batches)
        total = searches(fit)
        left = total  # searches of the parts that have not ended

        def send(part: FitRequest) -> FitResult:
            nonlocal left
            own = searches(part)

            def tell(progress: FitProgress) -> None:
                active = left - own + progress.active
                report(FitProgress(progress.iterations, active, total))

            result: FitResult = self._failover.call_with_failover(
                Request(
                    "Optimize",
                    codec.fit_to_message(part).SerializeToString(),
                    read=lambda messages: codec.read_fit(part, messages, tell),
                    is_single=not part.settings.progress,
                    dataset=data.dataset,
                    deadline=deadline.part(own / left) if part.settings.partial else deadline,
                )
            )
            left -= own
            return result

        batch = fit.problem.batch
        told = options.get("progress") or (lambda _: None)
        with CallingBack(told) as report, _naming_the_program(expressions, batch, data.names):
            result = self._limits.call_in_parts(fit, data.layout, send)
        data.warn_of_range(expressions, batch, result)
        found = Fit.of(result, fit, data)
        if not fit.settings.curvature:
            return found
        evidence = gather(self.optimize, data, fit, result, options, deadline)
        covariance = evidence.covariances if found.covariance is None else found.covariance
        return replace(found, evidence=evidence, covariance=covariance)

    @shows_keywords(SimplifyOptions, precision="precise", tier="auto", tolerance=0.01, loss="mse")
    def simplify(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[SimplifyOptions],
    ) -> Simplification:
        """Shorten formulas as far as they fit the data hardly worse.

        The exact rules of `warpfit.Program.simplify` come first. Then constants become integers,
        short decimals, fractions or multiples of pi and e, and terms and factors that do not matter
        are dropped, each time with the other constants fitted again on the server. Greedy: in each
        round the change that saves most is taken; all formulas of a call advance together.

        ::

            found = client.simplify(data, ["1.9999*x1 + 3.1415*sin(x2) + 1e-9*x3"])
            found.programs[0]  # 2*x1 + pi*sin(x2)

        Args:
            data: a handle that `upload` of this or another client has returned, with a target.
            expressions: as for `evaluate`.
            parameters: for each expression its parameters [n]; they become constants.
            **options: ``tolerance`` (0.01: a loss may grow by one percent, or by what is nothing
                but rounding errors), ``loss`` ("mse" by default), ``snap`` ("constants" by default,
                "numbers" without pi and e, or False), ``assume_defined``, ``allows`` (a function
                of a program: what it refuses is not made of a formula), ``rows``,
                ``precision``, ``tier``, ``timeout``.

        Returns:
            The programs, with constants alone, and their losses. None is worse than ``tolerance``
            allows, measured against the given formula with its constants fitted. The sign of a zero
            is not kept, see `warpfit.Program.simplify`.

        Raises:
            InvalidArgumentError: for arguments that are wrong or do not fit together.
            DeadlineExceededError: if ``timeout`` passes.
            UnimplementedError: if the server's engine computes no derivatives.
        """
        arguments.check_keywords(options, SimplifyOptions, "parameters")
        task = SimplifyTask(data, expressions, parameters, options)
        found = task.proceed()
        while not isinstance(found, Simplification):
            found = task.proceed(self.optimize(data, *found, **task.fit_options()))
        return found

    @shows_keywords(
        ProposeOptions,
        loss="mse",
        restarts=8,
        seed=0,
        held_out=0.2,
        missing="refuse",
        precision="precise",
        tier="auto",
    )
    def propose(
        self, data: DatasetHandle, skeletons: Any, **options: Unpack[ProposeOptions]
    ) -> Proposals:
        """Fit skeletons of formulas, and say of each how good and how sure its formula is.

        A skeleton is a formula whose constants are parameters p1, p2, .... Those of a language
        model, or of any other source, may be wrong: one that is no formula, has other names, units
        or more parameters than there are rows gets an answer that says so, with place and remedy,
        and leaves those of the others alone.

        ::

            found = client.propose(data, ["p1*exp(p2*x1)", "p1*x1 +", "p1 + p2*x1"])
            for answer in found:
                print(answer.error or (answer.simplified, answer.held_out_loss, answer.warnings))
            print(found.best.simplified)

        Args:
            data: a handle that `upload` of this or another client has returned, with a target.
            skeletons: a list of at most 10,000 expressions as for `evaluate`, or a single one.
            **options: ``loss`` ("mse" by default), ``restarts`` (8), ``seed``, ``held_out`` (0.2:
                the last fifth of the rows is left to judge by), ``missing``, ``units`` and
                ``target_unit``, ``precision``, ``tier``, ``timeout``, ``progress``; see
                `warpfit.calls.proposals.ProposeOptions`.

        Returns:
            For each skeleton a `warpfit.calls.proposals.Proposal`: its error, or formula, losses,
            evidence, terms and warnings, and how often this client has tried it before.

        Raises:
            InvalidArgumentError: for options that are wrong, or data without a target.
            DeadlineExceededError: if ``timeout`` passes before a skeleton was fitted; later, those
                that were not have this error, as after the loss of the server.
            UnavailableError: if the server is lost before a skeleton was fitted.
            UnimplementedError: if the server's engine computes no derivatives.
        """
        arguments.check_keywords(options, ProposeOptions)
        return ProposeTask(self, data, options).run(skeletons, self._tried)

    @shows_keywords(
        SearchOptions,
        max_size=25,
        loss="mse",
        form="scaled",
        pairs=True,
        fit_iterations=15,
        screening_rows=512,
        seed=0,
    )
    def search(self, data: DatasetHandle, **options: Unpack[SearchOptions]) -> SearchResult:
        """Search for formulas that predict the target, on the server, beside the data.

        ::

            found = client.search(data, seconds=10, progress=print)
            print(found)
            print(found.texts[-1], found.losses[-1], found.reason)

        The engine breeds, scores and fits formulas until the budget is spent. If an engine or a
        server is lost meanwhile, the search goes on from its last front with what is left of the
        budget; `SearchResult.interruptions` and a line of the log say so. An interrupt (Ctrl-C)
        ends the search, and leaves a client that works.

        Args:
            data: a handle that `upload` of this or another client has returned, with a target.
            **options: the budget, of which one limit is needed: ``seconds``, ``generations``,
                ``formulas``; what may end it earlier: ``target_loss``, ``idle_generations``; what
                formulas are made of: ``operators``, ``variables``, ``max_size``, ``max_depth``,
                ``complexities``, ``counts``, ``nesting``, ``arguments``, ``units``,
                ``target_unit``, ``dimensionless_constants``; what they are to do: ``loss``,
                ``form``, ``template``, ``group``, ``guesses``; how they are found: ``islands``,
                ``population``, ``pairs``, ``fit_iterations``, ``screening_rows``, ``rows``,
                ``seed``; and ``timeout``, ``partial``, ``progress``. See
                `warpfit.calls.search.SearchOptions`.

        Returns:
            The best formula of each size, as far as larger ones are better.

        Raises:
            InvalidArgumentError: for arguments that are wrong or do not fit together, without a
                budget, or if nothing fulfils the rules.
            ResourceExhaustedError: if the population is too large, or more searches run than may
                for longer than the retry policy waits.
            DeadlineExceededError: if ``timeout`` passes before any formula was found.
            UnavailableError: if the server is lost for longer than the retry policy waits, and
                ``partial`` is not set.
            UnimplementedError: if the server, or its engine, runs no searches, or none with a
                template or groups.
        """
        arguments.check_keywords(options, SearchOptions)
        deadline = deadline_of(options.get("timeout"))
        request = build_search(data, options)
        with CallingBack(options.get("progress") or (lambda _: None)) as report:
            run = SearchRun(request, data, report)
            call = Request(
                "Search",
                run.message(),
                read=run.read,
                is_single=False,
                dataset=data.dataset,
                deadline=deadline,
                go_on=run.go_on,
            )
            try:
                self._failover.call_with_failover(call)
            except SearchEndedError as end:
                return run.result(end.reason)
            except DeadlineExceededError:
                if not run.has_found:
                    raise
                return run.result(SearchReason.TIME)
            except UnavailableError:
                if not (options.get("partial") and run.has_found):
                    raise
        return run.result()

    def release(self, data: DatasetHandle, *, everywhere: bool = False) -> None:
        """Give a data set back, which the end of a handle's ``with`` block does, too.

        Whoever uploads the same content shares one data set. So this takes it from nobody: it tells
        the server that this caller does not need it. What no call uses after that makes room before
        all other data sets, and is found at once by an upload that comes earlier. The handle stays
        usable, and uploads again what is gone.

        Args:
            data: a handle that `upload` of this or another client has returned.
            everywhere: whether to remove the data set at once, whoever uses it. Their handles
                upload it again, but for those without numbers (from a pickle), whose calls end in
                DatasetNotFoundError.

        Raises:
            UnavailableError: if the server stays away; only with ``everywhere``, because a server
                that is away has nothing to keep.
        """
        dataset = checked_handle(data).dataset
        message = codec.release_message(dataset, everywhere=everywhere)
        failover = self._failover
        if everywhere and not failover.servers.is_several:
            with suppress(DatasetNotFoundError):
                failover.call_with_failover(Request("ReleaseVariables", message))
            return
        # A server that cannot be reached evicts the data set some time. So a caller that has done
        # its work does not wait for it.
        for server in failover.servers.homes(data.content_id, data.layout.nbytes):
            deadline = Deadline(_RELEASE_SECONDS)
            failover.call_if_up(server, Request("ReleaseVariables", message, deadline=deadline))

    def info(self, timeout: float | None = None) -> ServerInfo:
        """Return the server's version, engine, devices, limits and operator table."""
        return self._info(self._failover, timeout)

    def wait_ready(self, timeout: float = 30.0) -> ServerInfo:
        """Wait until the server answers.

        Raises:
            DeadlineExceededError: if it does not within ``timeout`` seconds.
            UnavailableError: if nobody listens at its address until then.
        """
        return self._info(self._failover.with_patience(), timeout)

    @staticmethod
    def _info(failover: Failover, timeout: float | None) -> ServerInfo:
        deadline = deadline_of(timeout)
        request = Request("GetServerInfo", codec.info_request(), deadline=deadline)
        return codec.info_from_message(failover.call_with_failover(request))

    def close(self) -> None:
        """Close the connection; data sets stay resident until they are evicted."""
        self._failover.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def not_made_so(given: Any, name: str, function: str) -> InvalidArgumentError:
    """Return the error for a client that is made of something else than a connection."""
    shown = repr(given) if isinstance(given, str) else type(given).__name__
    return InvalidArgumentError(
        f"{name} is not made of {shown}",
        "BAD_CLIENT",
        f"Use warpfit.{function}({shown if isinstance(given, str) else '...'})",
        "client",
    )


#: What stands for keywords of other packages in `connect`.
CONNECTING: Final = {
    **dict.fromkeys(("host", "port", "url", "server"), 'Write the address as "HOST:PORT"'),
    "timeout": "Give timeout= to each call; wait= is for a server that is starting",
}


@explains_keywords(**CONNECTING)
def connect(
    address: Address = None,
    *,
    token: str | None = None,
    tls: TlsConfig | bool | None = None,
    retry: RetryPolicy | None = None,
    transport: TransportConfig | None = None,
    wait: float | None = None,
    replicas: int = 2,
) -> Client:
    """Make a client; nothing is sent before the first call.

    Args:
        address: ``"HOST:PORT"``; several of them, separated by commas or in a list; all addresses
            of a name, ``"dns:///NAME:PORT"``, which is resolved again and again; or a callable that
            returns the addresses that there are now (`warpfit.transport.connection.Resolver`). By
            default WARPFIT_ADDRESS, or 127.0.0.1:50551.
        token: bearer token, where the server asks for one; by default WARPFIT_TOKEN.
        tls: True for TLS with the system's certificates, a `warpfit.TlsConfig` for others or with
            a client certificate, False for plain text. By default TLS if one of WARPFIT_TLS (1),
            WARPFIT_CA, WARPFIT_CLIENT_CERT, WARPFIT_CLIENT_KEY, WARPFIT_SERVER_NAME is set.
        retry: when to repeat a call that the server could not answer.
        transport: chunk size, message limits and keepalive.
        wait: seconds for which the first call waits for a server that is still starting. By default
            it fails after 1.5 s if nobody listens. Later calls wait as ``retry`` says.
        replicas: on how many of several servers each data set lives; those of up to 16 MiB live on
            all, or on 16 of them. A call goes to one with the fewest calls of this client in
            flight, and to another one if it fails or is busy.

    Raises:
        InvalidArgumentError: if the address has no port, a file cannot be read, or the token would
            leave this machine in plain text without ``tls=False``.
    """
    return Client.of(Connection.of(address, token, tls, retry, transport, wait, replicas))


@contextmanager
def _naming_the_program(expressions: Any, batch: Batch, names: tuple[str, ...]) -> Iterator[None]:
    """Add the program's text, as it was given, and the place in it to an error of a token."""
    try:
        yield
    except ProgramError as error:
        index, token = error.expression, error.token
        if index is not None and token is not None and index < len(batch):
            error.text, error.position = locate(batch.program(index), token, names)
            listed = expressions if isinstance(expressions, list | tuple) else [expressions]
            if len(listed) == len(batch) and isinstance(listed[index], str):
                placed = place_in(listed[index], error.text, error.position)
                error.text, error.position = placed
        raise


@explains_keywords('Give flags of `warpfit serve`, such as local("--devices", "cpu")')
@contextmanager
def local(*flags: str) -> Iterator[Client]:
    """Start a server on this machine for the time of a ``with`` block, and connect to it.

    ::

        with warpfit.local() as client:
            data = client.upload(X, y)

    The server computes on the GPU if there is one. Processes of this machine that get the client,
    or a handle, by pickle may use it while the block lasts.

    Args:
        flags: further flags of ``warpfit serve``, such as ``"--threads", "2"``.

    Raises:
        InvalidArgumentError: if the server is not installed.
        UnavailableError: if it does not start; the message quotes the end of its log.
    """
    with embedded_server(flags) as address, connect(address, tls=False) as client:
        yield client


def simplify(
    expressions: Any,
    data: DatasetHandle,
    parameters: Parameters = None,
    **options: Unpack[SimplifyOptions],
) -> Simplification:
    """Shorten formulas on the server that a data set was uploaded to; see `Client.simplify`.

    Raises:
        InvalidArgumentError: if ``data`` is no result of `Client.upload`.
    """
    if not isinstance(data, UploadedDataset):
        raise InvalidArgumentError(
            f"data is {type(data).__name__}, which belongs to no blocking client",
            "BAD_DATA",
            "Pass what client.upload(X, y) returned, or use client.simplify; "
            "without data, program.simplify() applies the exact rules",
            "data",
        )
    return data._client.simplify(data, expressions, parameters, **options)
