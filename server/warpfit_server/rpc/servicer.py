"""The gRPC service: each method decodes, checks, asks the engine or the main process, and encodes.

The methods raise WarpfitErrors as they are, of which `warpfit_server.rpc.calls` makes
statuses. Requests arrive and answers leave as bytes, so that `warpfit.codec` alone decides how they
are parsed and framed, and malformed bytes get an answer that says so.

The port of the service, with its threads and the certificates that it shows, is made here, too.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import grpc

from warpfit import codec, search_codec
from warpfit.dataset import Layout
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit.request import Evaluation, FitRequest, FitResult, Timings
from warpfit.server_info import Device, Limits, ServerInfo
from warpfit.transport.connection import check_secret
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.admission import Admission, CallCost, TenantTurns
from warpfit_server.config import Config
from warpfit_server.dataset_store import DataFolder, Upload, UploadStore
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.ipc.quarantine import Suspects
from warpfit_server.ipc.router import (
    KnownDataset,
    ParallelSearch,
    Registry,
    Router,
    SplitRequest,
    seeded,
)
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.limits import (
    check_batch,
    check_fit,
    check_header,
    check_limits,
    check_names,
    check_result,
    check_search,
    evaluation_memory,
)
from warpfit_server.logs import CallRecord
from warpfit_server.machine import cannot_listen, join_address
from warpfit_server.rpc.calls import HELD_REFUSALS, Call, Method
from warpfit_server.tenants import WatchedFiles, key_of

#: Time kept for the last pass and the way back of a partial answer, and as a share of the deadline.
_ANSWER_SECONDS: Final = 0.05
_ANSWER_SHARE: Final = 0.1
#: The share of the deadline of a search, which is often long.
_SEARCH_ANSWER_SHARE: Final = 0.01
#: Work of a search as routers count it: it takes every other turn of an engine until it ends.
_SEARCH_NANOSECONDS: Final = 1_000_000_000
#: Deadlines that are further away are none: gRPC tells three centuries where a call has none, which
#: is more than timers take.
_NO_DEADLINE_SECONDS: Final = 1e8
#: The messages of an answer; the last one is returned, so that the call is in flight no more when
#: it is sent.
Answer = Generator[bytes, None, bytes]
SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Evaluator"].full_name


class Store(UploadStore, Protocol):
    """Methods of the main process, which owns the data sets, that the service calls."""

    def find(self, key: bytes) -> FoundDataset: ...
    def give_back(self, key: bytes) -> None: ...
    def remove(self, key: bytes) -> None: ...
    def evict_for_device(self, tenant: str) -> int: ...
    def describe(self, tenant: str) -> tuple[tuple[Device, ...], int]: ...


class Servicer:
    """Implements all methods of evaluator.proto, in every front end.

    Args:
        store: of the data sets, in the main process.
        registry: of the data sets that this process knows.
        router: sends requests to engines.
        suspects: batches and data sets that are not run.
        admission: accepts or refuses requests.
        pool: makes the memory of uploads.
        config: the server's configuration.
    """

    def __init__(
        self,
        store: Store,
        registry: Registry,
        router: Router,
        suspects: Suspects,
        admission: Admission,
        pool: SegmentPool,
        config: Config,
    ) -> None:
        self._store = store
        self._registry = registry
        self._router = router
        self._suspects = suspects
        self._admission = admission
        self._pool = pool
        self._chunk_bytes = config.chunk_bytes
        self._engine = config.engines[0].kind
        self._folder = DataFolder(config.data_root, store, pool)
        self._reading = TenantTurns()
        self._version = version("warpfit")  # reads files

    def methods(self) -> dict[str, Method]:
        """Return the methods of the service by name."""
        return {
            "Evaluate": Method(partial(self._serve, fits=False), streams=True),
            "Optimize": Method(partial(self._serve, fits=True), streams=True),
            "Search": Method(self.search, streams=True),
            "UploadVariables": Method(self.upload_variables, uploads=True),
            "OpenDataset": Method(self.open_dataset),
            "GetVariables": Method(self.get_variables),
            "ReleaseVariables": Method(self.release_variables),
            "GetServerInfo": Method(self.get_server_info),
        }

    def _serve(self, message: bytes, context: Call, *, fits: bool) -> Answer:
        """Decode, check and admit a request, send it to an engine, and stream the answer.

        The message is an OptimizeRequest if it ``fits``, else an EvaluateRequest. Values are sent
        while the engine still computes; a fit's progress is sent if the request asks for it.
        """
        record, admission = context.record, self._admission
        tenant, limits, arrived = record.tenant, context.limits, time.monotonic_ns()
        kind = pb.OptimizeRequest if fits else pb.EvaluateRequest
        parsed: Any = codec.parse_message(kind, message)
        sent = parsed.problem if fits else parsed
        loss_tokens = len(sent.loss_function.codes)
        check_limits(limits, tokens=len(sent.programs.codes), loss_tokens=loss_tokens)
        key = key_of(tenant, codec.check_content_id(sent.content_id))
        fit = codec.fit_from_message(parsed, key) if fits else None
        evaluation = codec.evaluation_from_message(parsed, key) if fit is None else fit.problem
        pieces = sent.pieces
        try:
            with self._registry.use(evaluation.dataset_id) as data:
                size, cost = _check(evaluation, fit, data, limits, pieces=pieces)
                nanoseconds = admission.costs.estimate(cost)
                context.reserve(size, nanoseconds)
                if fit is None:
                    request = InFlightRequest.of_evaluation(evaluation, data.layout, tenant)
                else:
                    stop = None  # unless a partial answer must arrive in time
                    if fit.settings.partial:
                        stop = _stop_in_time(context.time_remaining(), _ANSWER_SHARE)
                    request = InFlightRequest.of_fit(fit, data.layout, stop, tenant)
                work = request.segment_layout
                record.programs, record.tokens = work.programs, work.tokens
                record.token_rows = work.token_rows
                record.decode = time.monotonic_ns() - arrived
                context.end_turn()
                context.check_wanted()
                in_flight = self._router.start(request, data, nanoseconds)
                try:
                    context.on_end(in_flight.cancel)
                    if fits:
                        return (yield from self._stream_progress(in_flight, record))
                    own = in_flight, data.layout, record
                    return (yield from self._stream_result(*own, pieces=pieces))
                finally:
                    in_flight.close()
                    for share, timings in in_flight.shares():  # estimates follow what calls take
                        part = CallCost(cost.kind, share * cost.units)
                        admission.costs.observe(part, timings.compute)
        except DatasetNotFoundError:  # perhaps it has left the engine just before this came there
            self._registry.forget(key)
            raise

    def _stream_result(
        self,
        in_flight: InFlightRequest | SplitRequest,
        data: Layout,
        record: CallRecord,
        *,
        pieces: bool,
    ) -> Answer:
        """Send values in chunks as they become ready, and other long arrays; return the end.

        No message is long, so that encoding a long answer delays no other call. Without ``pieces``
        the end is the whole answer, which `check_result` keeps short.
        """
        layout, segment = in_flight.segment_layout, in_flight.segment
        # Views of what the engine fills: making them while it computes costs the caller no time.
        arrays = {
            name: layout.view(name, segment)
            for name in codec.ANSWER_ARRAYS
            if name in layout.arrays
        }
        values = arrays.pop("values", memoryview(b""))
        start = codec.result_start(data, (layout.programs, layout.vectors, layout.rows))
        message, sent, ready = start, 0, 0
        timings = None
        while timings is None:
            reply = in_flight.next_reply()
            if isinstance(reply, messages.RequestFinished):
                timings, ready = self._record_answer(in_flight, record), len(values)
                if not pieces:
                    whole = {"values": values, **arrays} if values else arrays
                    return start + codec.result_end(timings, whole)
            elif not pieces:
                continue
            elif isinstance(reply, messages.ValuesReady):  # only whole chunks before the end
                ready = reply.programs * layout.program_bytes // self._chunk_bytes
                ready *= self._chunk_bytes
            for piece in codec.array_pieces("values", values[sent:ready], sent, self._chunk_bytes):
                if message is not start:  # the first chunk goes with the start of the result
                    yield message
                    message = b""
                message += piece
            sent = ready
        long = [name for name, array in arrays.items() if not codec.is_whole(name, len(array))]
        if long:
            yield message
            message = b""
        for name in long:
            yield from codec.array_pieces(name, arrays.pop(name), 0, self._chunk_bytes)
        return message + codec.result_end(timings, arrays)

    def _stream_progress(
        self, in_flight: InFlightRequest | SplitRequest | ParallelSearch, record: CallRecord
    ) -> Answer:
        """Send the progress of a fit or a search, and return its end."""
        last = b""
        while True:
            reply = in_flight.next_reply()
            if isinstance(reply, messages.FitProgressed):
                yield codec.progress_to_bytes(reply.progress)
            elif isinstance(reply, messages.SearchProgressed):
                record.programs = reply.progress.formulas
                last = search_codec.progress_to_bytes(reply.progress)
                if reply.progress.reason is None:
                    yield last
            elif isinstance(reply, messages.RequestFinished):
                timings = self._record_answer(in_flight, record)
                if isinstance(in_flight, ParallelSearch):
                    return last + search_codec.search_end(timings)
                arrays: Any = in_flight.segment_layout.results(in_flight.segment)
                return codec.fit_to_bytes(FitResult(**arrays, timings=timings))

    def search(self, message: bytes, context: Call) -> Answer:
        """Decode, check and admit a search, send it to engines, and stream progress and end.

        It counts as no engine time in the queue: requests that come later have turns beside it.
        """
        record, admission = context.record, self._admission
        tenant, limits, arrived = record.tenant, context.limits, time.monotonic_ns()
        parsed = search_codec.search_from_bytes(message)
        template, loss = len(parsed.template.codes), len(parsed.loss_function.codes)
        check_limits(limits, loss_tokens=loss, program_tokens=template)
        key = key_of(tenant, codec.check_content_id(parsed.content_id))
        search = search_codec.search_from_message(parsed, key)
        del parsed
        try:
            with self._registry.use(key) as data:
                size = check_search(search, data.layout, limits, admission.most_bytes)
                with admission.searching(tenant, limits):
                    free = len(self._router.free_engines(_SEARCH_NANOSECONDS))
                    searches = seeded(search, max(1, min(free, admission.most_bytes // size)))
                    context.reserve(size * len(searches), 0)
                    stop = _stop_in_time(context.time_remaining(), _SEARCH_ANSWER_SHARE)
                    of_one = partial(
                        InFlightRequest.of_search, layout=data.layout, deadline=stop, tenant=tenant
                    )
                    record.decode = time.monotonic_ns() - arrived
                    context.end_turn()
                    context.check_wanted()
                    requests = [of_one(each) for each in searches]
                    sent = self._router.start_search(requests, data, _SEARCH_NANOSECONDS)
                    is_score = search.loss_function.is_score
                    in_flight = ParallelSearch(sent, is_score=is_score)
                    try:
                        context.on_end(in_flight.cancel)
                        data.call_on_withdrawal(in_flight.cancel)
                        return (yield from self._stream_progress(in_flight, record))
                    except CancelledError as error:
                        if data.is_withdrawn and context.is_active():
                            raise DatasetNotFoundError from error
                        raise
                    finally:
                        data.call_no_more(in_flight.cancel)
                        in_flight.close()
        except DatasetNotFoundError:
            self._registry.forget(key)
            raise

    def _record_answer(
        self, in_flight: InFlightRequest | SplitRequest | ParallelSearch, record: CallRecord
    ) -> Timings:
        """Record the timings of a finished call; return the answer for its caller.

        Where there are several tenants none learns whether kernels were compiled already: another
        one may have had them compiled.
        """
        assert in_flight.timings is not None  # it has finished
        t = in_flight.timings
        others = t.queue, t.copy_in, t.compute, t.copy_out, t.tier, t.cache_hits
        record.timings = told = Timings(record.decode, *others, in_flight.device)
        record.finished = time.monotonic_ns()
        hides = self._admission.is_shared and told.cache_hits
        return replace(told, cache_hits=0) if hides else told

    def upload_variables(self, requests: Iterator[bytes], context: Call) -> bytes:
        """Receive a data set into shared memory and have an engine load it."""
        tenant = context.record.tenant
        limits = self._admission.limits(tenant)
        header = next(requests, b"")
        check_header(header, limits)
        first = codec.parse_message(pb.UploadVariablesRequest, header, most_fields=None)
        check_limits(limits, names=len(first.header.layout.names))
        layout, content_id = codec.upload_header(first)
        check_names(layout.names, limits)
        key = key_of(tenant, content_id)
        self._suspects.check(key)
        with suppress(DatasetNotFoundError):
            return _info(self._store.find(key))
        check_limits(limits, dataset_bytes=layout.nbytes, rows=layout.rows)
        own = layout, content_id, tenant, limits.resident_bytes
        with Upload(self._store, self._pool, *own) as upload:
            context.end_turn()
            for message in requests:
                upload.add(codec.upload_data(message))
            found = upload.commit()
        self._place(found, tenant)
        context.record.received_bytes = layout.nbytes
        return _info(found)

    def open_dataset(self, message: bytes, context: Call) -> bytes:
        """Read a data set from a file of the server; few calls of a tenant do so at a time."""
        request = codec.parse_message(pb.OpenDatasetRequest, message)
        tenant, file = context.record.tenant, codec.open_request(request)
        limits = self._admission.limits(tenant)
        check_names(file.x, limits)
        context.end_turn()
        check_wanted = context.check_wanted
        self._reading.acquire(tenant, check_wanted)
        try:
            known = self._folder.known(file)
            if known is not None:  # another call may have read it meanwhile
                key = key_of(tenant, known[0])
                self._suspects.check(key)
                with suppress(DatasetNotFoundError):
                    return _info(self._store.find(key), known[1])
            reserve = partial(self._admission.reserved, tenant)
            found, lost_digits = self._folder.read(file, tenant, limits, check_wanted, reserve)
            self._place(found, tenant)
        finally:
            self._reading.release(tenant)
        context.record.received_bytes = found.layout.nbytes
        return _info(found, lost_digits)

    def _place(self, found: FoundDataset, tenant: str) -> None:
        """Have an engine load a data set that has come, evicting others where no device has room.

        It is removed again if that fails, unless it was there before. Others may evict or remove it
        in the meantime; an upload is answered all the same, and the next call is told.
        """
        key, size, evicted = found.key, found.layout.nbytes, 0
        self._registry.add(found)
        try:
            self._suspects.check(key)
            with self._registry.use(key) as data:
                while True:
                    try:
                        return self._router.place(data, self._registry.loads)
                    except ResourceExhaustedError as error:
                        is_enough = evicted >= 2 * size * self._router.engines
                        freed = 0 if is_enough else self._store.evict_for_device(tenant)
                        if error.reason != "DEVICE_MEMORY" or not freed:
                            raise
                        evicted += freed
        except DatasetNotFoundError:
            return None
        except BaseException:
            if found.is_fresh:
                with suppress(DatasetNotFoundError):
                    self._store.remove(key)
            raise

    def get_variables(self, message: bytes, context: Call) -> bytes:
        """Describe a data set if it is resident, and renew its lease."""
        request = codec.parse_message(pb.GetVariablesRequest, message)
        key = key_of(context.record.tenant, codec.check_content_id(request.content_id))
        self._suspects.check(key)
        return _info(self._store.find(key))

    def release_variables(self, message: bytes, context: Call) -> bytes:
        """Take note that a caller does not need a data set any more, or remove it for all."""
        request = codec.parse_message(pb.ReleaseVariablesRequest, message)
        key = key_of(context.record.tenant, codec.check_content_id(request.content_id))
        if request.everywhere:
            self._store.remove(key)
        else:
            self._store.give_back(key)
        return pb.ReleaseVariablesResponse().SerializeToString()

    def get_server_info(self, message: bytes, context: Call) -> bytes:
        """Describe the server."""
        codec.parse_message(pb.GetServerInfoRequest, message)
        tenant = context.record.tenant
        devices, datasets = self._store.describe(tenant)
        info = ServerInfo(
            version=self._version,
            engine=self._engine,
            devices=devices,
            limits=self._admission.limits(tenant),
            operators=codec.operator_infos(),
            datasets=datasets,
            contract=codec.CONTRACT,
        )
        return codec.info_to_message(info).SerializeToString()


def _check(
    problem: Evaluation,
    fit: FitRequest | None,
    data: KnownDataset,
    limits: Limits,
    *,
    pieces: bool,
) -> tuple[int, CallCost]:
    """Check a request on its data set; return the bytes that it takes, and its cost."""
    layout = data.layout
    check_batch(problem.batch, limits)
    if fit is not None:
        fit.check(layout)
        size, cost = check_fit(fit, layout, limits), CallCost.of_fit(fit, layout)
    else:
        problem.check_options(layout)
        problem.batch.check_shapes()  # the engine looks at the tokens
        size = check_result(problem, layout, limits, pieces=pieces)
        size += evaluation_memory(problem, layout)
        cost = CallCost.of_evaluation(problem, layout)
    values = problem.batch.values  # an array of its own if the message has fewer
    return size + values.nbytes * values.flags.owndata, cost


def _info(dataset: FoundDataset, lost_digits: str = "") -> bytes:
    """Describe a data set."""
    return codec.dataset_info(dataset.content_id, dataset.layout, dataset.names, lost_digits)


def _stop_in_time(remaining: float | None, share: float) -> float | None:
    """Return when an engine must stop for an answer in time; None without a deadline.

    The moment is on the clock of ``time.monotonic()``. ``remaining`` are the call's seconds, of
    which a ``share`` is kept for the way back.
    """
    if remaining is None or remaining > _NO_DEADLINE_SECONDS:
        return None
    margin = max(_ANSWER_SECONDS, share * remaining)
    return time.monotonic() + max(0.0, remaining - margin)


# ------------------------------------------------------------------------------------ the gRPC port

_LOG: Final = logging.getLogger("warpfit.port")
_TLS_LOG: Final = logging.getLogger("warpfit.tls")
_KEEPALIVE_MS: Final = 20_000
#: Shortest time between the pings of a client, half of what `warpfit.TransportConfig` does.
_PING_MS: Final = 500
#: Calls of one connection at a time. gRPC also refuses new ones while as many cancelled calls wait
#: to be noticed, so that one connection's resets do not fill its queue of new calls.
_STREAMS: Final = 128
#: Time that TLS and the first frames of a connection may take.
_HANDSHAKE_MS: Final = 10_000
#: Seconds without a call after which a thread ends.
_IDLE_SECONDS: Final = 60.0
#: Threads beside those of open calls, which refuse the calls that are too many.
_REFUSING_THREADS: Final = 8 + HELD_REFUSALS
#: Threads of a port for health checks.
HEALTH_THREADS: Final = 144


class CallThreads(ThreadPoolExecutor):
    """The threads that serve the calls of a port, at most as many as calls have come at a time.

    A task goes to the thread that has had the last one, if that is idle, and threads that have had
    none for a minute end. Python's own executor counts a thread as busy for ever if another thread
    takes its task, and so goes on starting threads, which end with the process. Each of them keeps
    some 100 KiB.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self._most, self._name, self._count = most, name, 0
        self._lock = threading.Lock()
        """Guards the number of threads, and what follows."""
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        """Where each idle thread waits for its next task; the last one has waited shortest."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Tasks that no idle thread was there for."""

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """Have a task done; where the system has no more threads, one of those there does it.

        The error would otherwise end the thread of gRPC that serves the port.
        """
        future: Future[Any] = Future()

        def do() -> None:
            try:
                result = task(*given, **named)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._idle:
                self._idle.pop().put(do)
                return future
            self._waiting.append(do)
            is_new = self._count < self._most
            self._count += is_new
        if is_new:
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:
                _LOG.error("no new thread for calls: %s", error)
                with self._lock:
                    self._count -= 1
        return future

    def _work(self) -> None:
        """Do one task after the other; the body of a thread."""
        own: SimpleQueue[Callable[[], None]] = SimpleQueue()
        while True:
            with self._lock:
                do = self._waiting.popleft() if self._waiting else None
                if do is None:
                    self._idle.append(own)
            while do is None:
                try:
                    do = own.get(timeout=_IDLE_SECONDS)
                except Empty:
                    with self._lock:
                        if own in self._idle:  # else a task is about to come
                            self._idle.remove(own)
                            self._count -= 1
                            return
            do()
            del do  # with all that the call refers to


def make_server(config: Config, service: str, handlers: Mapping[str, Any]) -> grpc.Server:
    """Make a gRPC server for one service, with threads for its open calls and for health checks.

    All front ends listen on the port, among which the kernel distributes the connections.
    """
    threads = config.open_calls + _REFUSING_THREADS + HEALTH_THREADS
    return grpc.server(
        CallThreads(threads, "call"),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
            # gRPC would decompress messages, a thousandfold, on the thread that serves the port,
            # before anybody could refuse the call.
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 1),
            ("grpc.max_allowed_incoming_connections", config.connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            # A client that vanishes must not keep its thread for ever. A client with several
            # servers sends a ping every second, which gRPC would otherwise treat as an attack.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
        ],
    )


def listen(server: grpc.Server, config: Config, port: int, credentials: Any) -> None:
    """Bind a server to a port that the main process has reserved, with TLS if configured.

    Raises:
        UnavailableError: if the port is taken.
    """
    address = join_address(config.host, port)
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise cannot_listen(config.host, port, "--host or --port") from error


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """Make credentials that follow the configured files, or None without TLS.

    gRPC asks for the certificates at each handshake, so a renewed one serves new connections, a
    moment after it was written, without a restart. Files that cannot be used, such as a certificate
    whose key has not been replaced yet, leave the old ones in force.

    Raises:
        InvalidArgumentError: if the files cannot be read, do not belong together, or others can
            read the key.
    """
    if not config.tls_cert:
        return None
    paths = [Path(p) for p in (config.tls_cert, config.tls_key, config.tls_client_ca) if p]
    certificate, key, *authorities = paths

    def read() -> grpc.ServerCertificateConfiguration:
        try:
            check_secret(key)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            for authority in authorities:
                context.load_verify_locations(authority)
            chain, private, *roots = [path.read_bytes() for path in paths]
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgumentError(
                f"the files {', '.join(map(str, paths))} cannot be used for TLS: {error}",
                "BAD_CERTIFICATE",
                "Give PEM files: a certificate chain, its key without a password, authorities",
            ) from error
        return grpc.ssl_server_certificate_configuration([(private, chain)], *roots)

    files = WatchedFiles(paths, read, _TLS_LOG, seconds=0.1)
    current = files.get()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for the next handshake, or None for no change."""
        nonlocal current
        known, current = current, files.get()
        return None if current is known else current

    fetch: Any = renewed  # gRPC's documentation allows None, its stubs do not
    return grpc.dynamic_ssl_server_credentials(
        current, fetch, require_client_authentication=bool(config.tls_client_ca)
    )
