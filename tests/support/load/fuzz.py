"""Random requests from a seed, from garbage bytes to valid ones with odd numbers; how they end."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

import grpc
import numpy as np

from support.servers.rpcs import METHODS, SERVICE, Caller, X, explained
from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.ops import OPERATORS
from warpfit.v1 import evaluator_pb2 as pb

#: Data sets that requests may name; some are resident, some are not.
DATASETS = [
    Dataset.of(X, X[:, 0], dtype="float64"),
    Dataset.of(X, X[:, 0], np.abs(X[:, 1]), dtype="float32"),
    Dataset.of(X[:7], dtype="float32"),
    Dataset.of(X[:1] + 5, X[:1, 0], dtype="float64"),
]
#: How a client leaves an open call; if it is silent, the server ends the call.
LAST_MOVES = ("half_close", "cancel", "silence")
#: Seconds after which a call that nobody goes on with must have ended, on a machine of any load.
PATIENCE = 30.0
#: Limits of a tenants file and flags that keep each request small, and the limits in the reach of
#: some calls that stay open.
LIMITS = """
[default]
tokens = 5000
programs = 200
vectors = 50
program_tokens = 2000
dataset_bytes = "1MiB"
"""
FLAGS = ("--max-result-bytes", "4MiB", "--max-resident-bytes", "256KiB", "--max-requests", "24")
FLAGS += ("--max-pending-bytes", "32MiB")
_ODD = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e300, -1e300, 5e-324, np.nan, np.inf, -np.inf, 2.0**53]
_BY_ARITY = {n: [op.code for op in OPERATORS.values() if op.arity == n] for n in (1, 2, 3)}
_WISHES = ("values", "gradient", "jacobian", "variable_gradient", "reductions", "linear_scaling")
_WISHES += ("correlation",)


@dataclass(frozen=True)
class Request:
    """One call: messages for a stream, else a single one; its size is the number of requests."""

    method: str
    messages: list[bytes]
    timeout: float
    size = 1


@dataclass(frozen=True)
class OpenCall(Request):
    """Several requests of one call of Evaluate, or of some equal calls at the same time.

    Those that are meant to be right are about ``dataset``. The moves are to send a message, to read
    an answer or to pause for some seconds, the last is one of `LAST_MOVES`.
    """

    NAME: ClassVar = "Evaluate, open"
    dataset: Dataset
    moves: list[str | float]
    width: int

    @property
    def size(self) -> int:
        return self.width * len(self.messages)


class Fuzzer:
    """Makes requests; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def requests(self) -> Iterator[Request]:
        makers: list[Callable[[], Request]] = [self._structured, self._mutated, self._garbage]
        makers += [self._upload, self._small, self._open, self._search]
        while True:
            yield self._random.choices(makers, [40, 25, 10, 20, 5, 10, 5])[0]()

    # ------------------------------------------------------------------------- kinds of request

    def _structured(self) -> Request:
        message = self._evaluation()
        if self._random.random() < 0.75:
            return self._request("Evaluate", message.SerializeToString())
        fit = pb.OptimizeRequest(
            problem=message,
            method=self._pick([0, 0, 0, 1, 1, 1, 2, 2, 2, 99]),
            max_iterations=self._pick([0, 1, 2, 5, 2**32 - 1] if self._rarely() else [0, 1, 3, 5]),
        )
        count = sum(np.frombuffer(message.programs.parameter_counts[:400], "<u4").tolist()[:50])
        count = min(count, 200) + self._pick([0, 0, 0, 1])
        self._change(fit, [True], "all_starts", "standard_errors", "covariance", "partial")
        self._change(fit, [True], "progress")
        self._change(fit, [self._numbers(count)], "lower", "upper")
        self._change(fit, [self._random.randbytes(count)], "fixed")
        tolerances = ("gradient_tolerance", "step_tolerance", "loss_tolerance")
        self._change(fit, [self._number()], *tolerances)
        return self._request("Optimize", fit.SerializeToString())

    def _search(self) -> Request:
        """Make a search that ends soon, if it is right."""
        names = [*OPERATORS, *map(str, (0, 1, 16, 17, 255)), "plus", "", "é"]
        odd = [0, 1, 2, 3, 25, 1_000, 1_001, 2**32 - 1]
        choices = {
            **{"max_generations": [0, 1, 1, 1, 2, 3], "islands": [0, 1, 2, 3, 2**20]},
            **{"population": [0, 1, 64, 256, 256, 256, 2**40], "screening_rows": [0, 1, 7, 2**63]},
            **{"loss": range(8), "form": [0, 0, 1, 9], "seed": range(2**62), "max_seconds": [0.5]},
        }
        drawn = {name: self._pick(values) for name, values in choices.items()}
        message = pb.SearchRequest(content_id=self._content_id(), **drawn)
        self._change(message, [True], "no_pairs")
        self._change(message, [0.0, -1.0, 0.01, np.nan, np.inf], "max_seconds")
        self._change(message, [0, 1, 3], "fit_iterations", "target_loss")
        self._change(message, [0, 1, 2, 9], "group")
        self._change(message.rules, odd, "max_size", "max_depth")
        self._change(message.units, [self._numbers(14)], "variables")
        self._change(message.units, [bytes(0), bytes(7), self._numbers(7)], "target")
        self._change(message.units, [True], "dimensionless_constants")
        for name in self._random.sample(names, self._pick([0, 0, 1, 3, 8])):
            message.operators[name] = self._number()
        for field in (message.rules.complexities, message.rules.counts):
            if self._rarely():
                field[self._pick(names)] = self._pick(odd)
        if self._rarely():
            message.rules.arguments[self._pick(names)].sizes.extend([-1, self._pick([-7, 0, 3])])
            message.rules.nesting.add(outer=self._pick(names), inner="sin", most=self._pick(odd))
        for field in (message.variables, message.increasing):
            if self._rarely():
                field.extend(self._pick([[0], [1, 0], [0, 0], [7], [2**32 - 1]]))
        if self._rarely():
            message.guesses.CopyFrom(self._programs())
        if self._rarely():
            message.template.codes, message.template.values = self._program(4, 2)
            message.template.arities.extend(self._pick([[], [1], [2, 1], [0], [9, 2**32 - 1]]))
            message.template.fitted = self._pick([0, 1, 2, 9])
        if self._rarely():
            codes, values = self._program(4, 2)
            message.definitions.add(name=self._pick(names), codes=codes, values=values)
        return self._request("Search", message.SerializeToString())

    def _mutated(self) -> Request:
        base = self._pick([*[self._structured] * 2, self._upload, self._small, self._search])()
        messages = list(base.messages)
        if messages:
            at = self._random.randrange(len(messages))
            messages[at] = self._mutate(messages[at])
        return self._request(base.method, *messages)

    def _garbage(self) -> Request:
        method = self._pick(list(METHODS))
        count = self._random.randrange(4) if METHODS[method][0] else 1
        sizes = [self._pick([0, 1, 2, 7, 40, 300, 3000]) for _ in range(count)]
        return self._request(method, *map(self._random.randbytes, sizes))

    def _upload(self) -> Request:
        dataset = self._pick(DATASETS)
        if self._random.random() < 0.3:
            shape = self._random.randrange(1, 300), self._random.randrange(1, 4)
            dataset = Dataset.of(np.full(shape, self._random.random()), dtype="float32")
        messages = [*codec.upload_messages(dataset, self._pick([1, 16, 64, 4096]))][:60]
        if self._random.random() < 0.5:
            header = pb.UploadVariablesRequest.FromString(messages[0])
            self._break_header(header.header)
            messages[0] = header.SerializeToString()
        if self._random.random() < 0.3:
            self._random.shuffle(messages)
        if self._random.random() < 0.3:
            messages = messages[: self._random.randrange(len(messages) + 1)]
        return self._request("UploadVariables", *messages)

    def _small(self) -> Request:
        method = self._pick(["GetVariables", "ReleaseVariables", "GetServerInfo"])
        about = pb.GetVariablesRequest(content_id=self._content_id()).SerializeToString()
        return self._request(method, b"" if method == "GetServerInfo" else about)

    def _open(self) -> OpenCall:
        dataset, moves, messages = self._pick(DATASETS), [], []
        for _ in range(self._random.randrange(16)):
            if self._random.random() < 0.02:
                moves.append(self._random.uniform(0.3, 0.9))  # the server waits for about 0.5
            messages.append(self._message(dataset))
            moves.append("send")
            if self._random.random() < 0.7:  # else the next one does not wait for the answer
                moves.append("read")
        last = self._random.choices(LAST_MOVES, [6, 3, 1])[0] if messages else LAST_MOVES[0]
        if last == "cancel":
            moves.append(self._random.uniform(0, 0.005))  # the answer may be on its way then
        width = self._pick([2, 2, 4, 4, 10, 10, 30, 140]) if self._random.random() < 0.02 else 1
        timeout = self._request("").timeout
        timeout = timeout if timeout < 1 else PATIENCE
        return OpenCall(OpenCall.NAME, messages, timeout, dataset, [*moves, last], width)

    def _message(self, dataset: Dataset) -> bytes:
        """Make a request of an open call; most are right."""
        kind = self._random.random()
        if kind < 0.03:
            return self._random.randbytes(self._pick([0, 1, 7, 300]))
        message = self._evaluation()
        if kind < 0.9:
            values = np.array([0.0, self._random.gauss(0, 3), 0.0]).tobytes()
            codes, sizes = bytes([1, 3, OPERATORS["add"].code]), np.array([3, 0], "<u4").tobytes()
            programs = pb.Programs(codes=codes, values=values, lengths=sizes[:4])
            programs.parameter_counts = sizes[4:]
            loss = self._pick([1, 2, 3, 4]) if dataset.layout.has_target else 0
            message = pb.EvaluateRequest(programs=programs, loss=loss, values=not loss)
        message.content_id = dataset.content_id
        sent = message.SerializeToString()
        return self._mutate(sent) if kind > 0.97 else sent

    # ------------------------------------------------------------------------- their parts

    def _request(self, method: str, *messages: bytes) -> Request:
        hurried = self._random.random() < 0.02
        return Request(method, [*messages], self._random.uniform(0.001, 0.05) if hurried else 5.0)

    def _evaluation(self) -> pb.EvaluateRequest:
        choices = {"precision": [0, 1], "loss": [0, 0, 1, 2, 3, 4, 5, 6], "tier": [0, 0, 1, 2]}
        drawn = {name: self._pick(values) for name, values in choices.items()}
        drawn |= {wish: self._random.random() < 0.2 for wish in _WISHES}
        own = {"content_id": self._content_id(), "programs": self._programs()}
        message = pb.EvaluateRequest(**own, **drawn)
        if self._random.random() < 0.9:  # make it agree with itself
            message.values |= not message.loss
            for wish in ("gradient", "variable_gradient", "linear_scaling"):
                if not message.loss or message.linear_scaling:
                    setattr(message, wish, False)
        if self._random.random() < 0.03:
            setattr(message, self._pick(["precision", "loss", "tier"]), self._pick([3, 7, 99]))
        rows = [0, 1, 3, 7, 49, 50, 51, 2**63, 2**64 - 1]
        self._change(message.rows, rows, "start", "stop")
        if self._rarely():
            function = message.loss_function
            function.codes, function.values = self._program(3, 0)
            function.closing = self._pick([0, 1, 2, 3, 4, 9])
        return message

    def _programs(self) -> pb.Programs:
        vectors = self._pick([0, 1, 1, 2, 5])
        codes, values, parameters = b"", b"", b""
        lengths, counts = [], []
        for _ in range(self._pick([1, 1, 2, 5, 20, 0 if self._rarely() else 3])):
            n = self._random.randrange(4)
            own, its_values = self._program(2, n)
            codes, values = codes + own, values + its_values
            lengths.append(len(own))
            counts.append(n)
            parameters += self._numbers(n * max(1, vectors))
        if self._rarely() and codes:
            at = self._random.randrange(len(codes))
            codes = codes[:at] + self._random.randbytes(1) + codes[at + 1 :]
        for numbers in (lengths, counts):
            if self._random.random() < 0.05 and numbers:
                at = self._random.randrange(len(numbers))
                numbers[at] = self._pick([0, 1, numbers[at] + 1, 2**31, 2**32 - 1])
        vectors = vectors if self._random.random() < 0.97 else self._pick([3, 51, 2**32 - 1])
        packed = (np.array(numbers, "<u4").tobytes() for numbers in (lengths, counts))
        given = dict(zip(("lengths", "parameter_counts"), packed, strict=True))
        found = {"codes": codes, "values": values, "parameters": parameters, "vectors": vectors}
        return pb.Programs(**found, **given)

    def _program(self, variables: int, parameters: int) -> tuple[bytes, bytes]:
        """Make codes and values of a postfix program, now and then with an index out of range."""
        codes: list[int] = []
        values: list[float] = []
        depth, tokens = 0, self._pick([1, 3, 8, 20, 60])
        while len(codes) < tokens or depth > 1:
            arity = self._random.randrange(4) if len(codes) < tokens else min(depth, 3)
            if arity > depth or arity == 0:
                codes.append(self._pick([1, 1, 2, 3] if parameters else [1, 1, 3]))
                limit = {1: variables, 2: parameters}.get(codes[-1])
                values.append(self._number() if limit is None else self._index(limit))
                depth += 1
            else:
                codes.append(self._pick(_BY_ARITY[arity]))
                values.append(0.0)
                depth -= arity - 1
        return bytes(codes), np.array(values, "<f8").tobytes()

    def _index(self, limit: int) -> float:
        return float(self._random.randrange(limit)) if self._random.random() < 0.995 else limit

    def _number(self) -> float:
        return self._pick(_ODD) if self._random.random() < 0.3 else self._random.gauss(0, 3)

    def _numbers(self, count: int) -> bytes:
        return np.array([self._number() for _ in range(count)], "<f8").tobytes()

    def _content_id(self) -> bytes:
        if self._random.random() < 0.03:
            return self._random.randbytes(self._pick([0, 1, 31, 32, 33]))
        return self._pick(DATASETS).content_id

    def _break_header(self, header: pb.UploadHeader) -> None:
        layout, kind = header.layout, self._random.randrange(6)
        if kind < 3:
            name = ("rows", "variables", "dtype")[kind]
            large = [2, 3, 77] if name == "dtype" else [2**40, 2**63, 2**64 - 1]
            setattr(layout, name, self._pick([0, 1, *large]))
        elif kind == 3:
            header.content_id = self._random.randbytes(self._pick([0, 31, 32]))
        elif kind == 4:
            layout.names.extend(self._pick([["a"], ["a", "a"], ["", "x1"], ["é" * 50]]))
        else:
            layout.has_target, layout.has_weights = not layout.has_target, self._rarely()

    def _mutate(self, message: bytes) -> bytes:
        data = bytearray(message)
        for _ in range(self._pick([1, 1, 2, 8]) if data else 0):
            at, width = self._random.randrange(max(1, len(data))), self._random.randrange(1, 40)
            kind = self._random.randrange(5)
            if kind == 0 and data:
                data[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                data[at : at + 1] = self._random.randbytes(1)
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                del data[at : at + width // 4]
            else:
                data[at:at] = data[at : at + width]
        return bytes(data)

    def _pick(self, choices: Sequence[Any]) -> Any:
        return self._random.choice(choices)

    def _rarely(self) -> bool:
        return self._random.random() < 0.1

    def _change(self, message: Any, values: list[Any], *names: str) -> None:
        """Give some of a message's fields one of the values."""
        for name in names:
            if self._rarely():
                setattr(message, name, self._pick(values))


#: What may come back. UNAVAILABLE would be a crash, INTERNAL and UNKNOWN a bug.
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
ALLOWED |= {"DEADLINE_EXCEEDED", "CANCELLED"}
#: What a request may get although it gets something else alone: it depends on other requests.
PASSING = {"DATASET_NOT_FOUND", "TOO_MANY_REQUESTS", "QUEUE_FULL", "MEMORY", "REFUSED_STREAM"}


def outcomes(caller: Caller, request: Request, counts: Counter[str]) -> list[tuple[str, str]]:
    """Send a request; return status and reason of each call, WRONG for an open one with a fault.

    What open calls have brought is added to ``counts``; gRPC's own errors have no reason.
    """
    if isinstance(request, OpenCall):
        return _keep_open(caller, request, counts)
    messages: Any = request.messages if METHODS[request.method][0] else request.messages[0]
    try:
        caller.send(request.method, messages, request.timeout)
    except grpc.RpcError as error:
        return [explained(error)[:2]]
    return [("OK", "")]


#: Calls of one connection at a time. Of more than that, gRPC itself resets some while as many that
#: were cancelled wait to be noticed, which happens on a busy machine.
STREAMS = 128


class _Kept:
    """One call that stays open, and the answers that it has brought."""

    def __init__(self, caller: Caller, timeout: float) -> None:
        self.sent: SimpleQueue[bytes | None] = SimpleQueue()
        name, parse = SERVICE + "Evaluate", pb.EvaluateResponse.FromString
        method = caller.channel.stream_stream(name, None, parse)
        self.rpc = method(iter(self.sent.get, None), timeout=timeout)
        self.answers: list[bytes] = []  # the content of each
        self.pieces: list[pb.EvaluateResponse] = []  # of an answer that is not complete

    def read(self) -> bool:
        """Read an answer; return False if the call has ended instead."""
        with suppress(grpc.RpcError):
            for piece in self.rpc:
                self.pieces.append(piece)
                if piece.HasField("timings"):
                    self.answers.append(_content(self.pieces))
                    self.pieces = []
                    return True
        return False

    def move(self, move: str | float, messages: Iterator[bytes]) -> None:
        if move == "send":
            self.sent.put(next(messages))
        elif move == "read":
            self.read()
        elif move == "cancel":
            self.rpc.cancel()
        elif move == "half_close":
            self.sent.put(None)


def _keep_open(caller: Caller, request: OpenCall, counts: Counter[str]) -> list[tuple[str, str]]:
    """Make open calls, and compare what they bring with what their requests bring alone."""
    with suppress(grpc.RpcError):  # if there is no room for it now
        caller.call("UploadVariables", request.dataset)
    alone = [_alone(caller, message) for message in request.messages]
    calls = [_Kept(caller, request.timeout) for _ in range(request.width)]
    messages = [iter(request.messages) for _ in calls]
    try:
        for move in request.moves:
            if isinstance(move, float):
                time.sleep(move)
            for call, rest in zip(calls, messages, strict=True):
                call.move(move, rest)
        while any(call.read() for call in calls):
            pass
    finally:
        for call in calls:
            call.rpc.cancel()
            call.sent.put(None)
    counts["calls"] += len(calls)
    counts[str(request.moves[-1])] += len(calls)
    counts["requests"] += request.size
    found = []
    for call in calls:
        end = explained(call.rpc)[:2]
        if request.width > STREAMS and end == (
            "UNAVAILABLE",
            "",
        ):  # reset by gRPC; a client retries
            end = "RESOURCE_EXHAUSTED", "REFUSED_STREAM"
        known = [one for one, _ in zip(alone, call.answers, strict=False) if one[0] == "OK"]
        counts["answers"] += len(call.answers)
        counts["answers_compared"] += len(known)
        fault = _fault(request, alone, call, end)
        found.append(("WRONG", fault) if fault else end)
    return found


def _alone(caller: Caller, message: bytes) -> tuple[str, str, bytes]:
    """Send a request in a call of its own; return status, reason and content of the answer."""
    try:
        answer = caller.send("Evaluate", message)
    except grpc.RpcError as error:
        return (*explained(error)[:2], b"")
    return "OK", "", _content([pb.EvaluateResponse.FromString(piece) for piece in answer])


def _content(pieces: list[pb.EvaluateResponse]) -> bytes:
    """Return what the messages of an answer say, but for what differs from call to call."""
    whole = pb.EvaluateResponse()
    for piece in pieces:
        whole.MergeFrom(piece)
    whole.values = b"".join(piece.values for piece in pieces)
    whole.jacobian = b"".join(piece.jacobian for piece in pieces)
    for name in ("timings", "offset"):
        whole.ClearField(name)
    return whole.SerializeToString(deterministic=True)


def _fault(request: OpenCall, alone: list[Any], call: _Kept, end: tuple[str, str]) -> str:
    """Say what is wrong with what a call has brought; nothing is if this is empty."""
    status, reason = end
    answered = len(call.answers)
    if answered > len(alone):
        return "there are more answers than requests"
    for number, content in enumerate(call.answers):
        if alone[number][0] == "OK" and content != alone[number][2]:
            return f"request {number} has another answer than alone"
        if alone[number][0] != "OK" and alone[number][1] not in PASSING:
            return f"request {number} has an answer, but alone it gets {alone[number][:2]}"
    if status == "OK" and (call.pieces or not answered):
        return "the call ends with OK before an answer is complete"
    pauses = [move for move in request.moves if isinstance(move, float)]
    waited = max(pauses, default=0.0) > 0.2 or request.moves[-1] == "silence"
    if status == "CANCELLED" and "cancel" not in request.moves and not waited:
        return "the call is cancelled by nobody"
    if status == "DEADLINE_EXCEEDED" and request.timeout == PATIENCE:
        return "the call does not end"
    if status in ("OK", "CANCELLED", "DEADLINE_EXCEEDED") or reason in PASSING:
        return ""
    if alone and answered == len(alone):
        return f"the call ends with {end} after all answers"
    expected = alone[answered][:2] if alone else ("INVALID_ARGUMENT", "NO_MESSAGE")
    if end != expected and expected[1] not in PASSING:
        return f"request {answered} ends the call with {end}, but alone it gets {expected}"
    return ""


def is_fine(found: tuple[str, str]) -> bool:
    """Tell whether an answer is one that a request may get: errors say why."""
    status, reason = found
    explains_itself = status in ("OK", "DEADLINE_EXCEEDED", "CANCELLED") or reason != ""
    return status in ALLOWED and explains_itself
