"""Random requests from a seed, from garbage bytes to valid ones with odd numbers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from support.servers.rpcs import METHODS, X
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
#: Flags that keep each request small, and the limits in the reach of some calls that stay open.
FLAGS = (
    *("--max-result-bytes", "4MiB", "--max-tokens", "5000", "--max-programs", "200"),
    *("--max-dataset-bytes", "1MiB", "--max-resident-bytes", "256KiB"),
    *("--max-message-bytes", "4MiB", "--max-vectors", "50", "--max-program-tokens", "2000"),
    *("--max-pending-bytes", "128MiB", "--max-requests", "24"),
)
_ODD = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e300, -1e300, 5e-324, np.nan, np.inf, -np.inf, 2.0**53]
_UNARY = [op.code for op in OPERATORS.values() if op.arity == 1]
_BINARY = [op.code for op in OPERATORS.values() if op.arity == 2]
_TERNARY = [op.code for op in OPERATORS.values() if op.arity == 3]
_WISHES = (
    *("values", "gradient", "jacobian", "variable_gradient", "reductions"),
    *("linear_scaling", "correlation"),
)


@dataclass(frozen=True)
class Request:
    """One call: messages for a stream, else a single one."""

    method: str
    messages: list[bytes]
    timeout: float

    @property
    def size(self) -> int:
        """Number of requests."""
        return 1


@dataclass(frozen=True)
class OpenCall(Request):
    """Several requests of one call of Evaluate, or of some equal calls at the same time."""

    NAME: ClassVar = "Evaluate, open"
    """Method of all of them."""
    dataset: Dataset
    """That the requests are about that are meant to be right."""
    moves: list[str | float]
    """Send a message, read an answer, pause for some seconds; the last is one of `LAST_MOVES`."""
    width: int
    """Number of calls."""

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.width * len(self.messages)


class Fuzzer:
    """Makes requests; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def requests(self) -> Iterator[Request]:
        """Yield requests without end."""
        makers: list[tuple[int, Callable[[], Request]]] = [
            (40, self._structured),
            (25, self._mutated),
            (10, self._garbage),
            (20, self._upload),
            (5, self._small),
            (10, self._open),
        ]
        weights, functions = zip(*makers, strict=True)
        while True:
            yield self._random.choices(functions, weights)[0]()

    # ------------------------------------------------------------------------- kinds of request

    def _structured(self) -> Request:
        message = self._evaluation()
        if self._random.random() < 0.75:
            return self._request("Evaluate", [message.SerializeToString()])
        fit = pb.OptimizeRequest(
            problem=message,
            method=self._pick([0, 0, 0, 1, 1, 1, 2, 2, 2, 99]),
            max_iterations=self._pick([0, 1, 2, 5, 2**32 - 1] if self._rarely() else [0, 1, 3, 5]),
            all_starts=self._rarely(),
            standard_errors=self._rarely(),
            covariance=self._rarely(),
            partial=self._rarely(),
            progress=self._rarely(),
        )
        count = sum(np.frombuffer(message.programs.parameter_counts[:400], "<u4").tolist()[:50])
        count = min(count, 200) + self._pick([0, 0, 0, 1])
        for name in ("lower", "upper"):
            if self._rarely():
                bounds = [self._number() for _ in range(count)]
                setattr(fit, name, np.array(bounds, "<f8").tobytes())
        if self._rarely():
            fit.fixed = self._random.randbytes(count)
        for name in ("gradient_tolerance", "step_tolerance", "loss_tolerance"):
            if self._rarely():
                setattr(fit, name, self._number())
        return self._request("Optimize", [fit.SerializeToString()])

    def _mutated(self) -> Request:
        base = self._pick([self._structured, self._structured, self._upload, self._small])()
        messages = list(base.messages)
        at = self._random.randrange(len(messages)) if messages else 0
        if messages:
            messages[at] = self._mutate(messages[at])
        return self._request(base.method, messages)

    def _garbage(self) -> Request:
        method = self._pick(list(METHODS))
        count = self._random.randrange(4) if METHODS[method][0] else 1
        sizes = [self._pick([0, 1, 2, 7, 40, 300, 3000]) for _ in range(count)]
        return self._request(method, [self._random.randbytes(size) for size in sizes])

    def _upload(self) -> Request:
        dataset = self._pick(DATASETS)
        if self._random.random() < 0.3:
            rows = self._random.randrange(1, 300)
            matrix = np.full((rows, self._random.randrange(1, 4)), self._random.random())
            dataset = Dataset.of(matrix, dtype="float32")
        messages = [
            message if isinstance(message, bytes) else message.SerializeToString()
            for message in codec.upload_messages(dataset, self._pick([1, 16, 64, 4096]))
        ]
        messages = messages[:60]
        if self._random.random() < 0.5:
            header = pb.UploadVariablesRequest.FromString(messages[0])
            self._break_header(header.header)
            messages[0] = header.SerializeToString()
        if self._random.random() < 0.3:
            self._random.shuffle(messages)
        if self._random.random() < 0.3:
            messages = messages[: self._random.randrange(len(messages) + 1)]
        return self._request("UploadVariables", messages)

    def _small(self) -> Request:
        method = self._pick(["GetVariables", "ReleaseVariables", "GetServerInfo"])
        request = b"" if method == "GetServerInfo" else None
        if request is None:
            request = pb.GetVariablesRequest(content_id=self._content_id()).SerializeToString()
        return self._request(method, [request])

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
        timeout = self._request("", []).timeout
        timeout = timeout if timeout < 1 else PATIENCE
        return OpenCall(OpenCall.NAME, messages, timeout, dataset, [*moves, last], width)

    def _message(self, dataset: Dataset) -> bytes:
        """Make a request of an open call; most are right."""
        kind = self._random.random()
        if kind < 0.03:
            return self._random.randbytes(self._pick([0, 1, 7, 300]))
        if kind < 0.9:
            programs = pb.Programs(
                codes=bytes([1, 3, OPERATORS["add"].code]),
                values=np.array([0.0, self._random.gauss(0, 3), 0.0]).tobytes(),
                lengths=np.array([3], "<u4").tobytes(),
                parameter_counts=bytes(4),
            )
            loss = self._pick([1, 2, 3, 4]) if dataset.layout.has_target else 0
            message = pb.EvaluateRequest(programs=programs, loss=loss, values=not loss)
        else:
            message = self._evaluation()
        message.content_id = dataset.content_id
        sent = message.SerializeToString()
        return self._mutate(sent) if kind > 0.97 else sent

    # ------------------------------------------------------------------------- their parts

    def _request(self, method: str, messages: list[bytes]) -> Request:
        hurried = self._random.random() < 0.02
        return Request(method, messages, self._random.uniform(0.001, 0.05) if hurried else 5.0)

    def _evaluation(self) -> pb.EvaluateRequest:
        message = pb.EvaluateRequest(
            content_id=self._content_id(),
            programs=self._programs(),
            precision=self._pick([0, 1]),
            loss=self._pick([0, 0, 1, 2, 3, 4, 5, 6]),
            tier=self._pick([0, 0, 1, 2]),
            **{wish: self._random.random() < 0.2 for wish in _WISHES},
        )
        if self._random.random() < 0.9:  # make it agree with itself
            message.values |= not message.loss
            for wish in ("gradient", "variable_gradient", "linear_scaling"):
                if not message.loss or message.linear_scaling:
                    setattr(message, wish, False)
        if self._random.random() < 0.03:
            setattr(message, self._pick(["precision", "loss", "tier"]), self._pick([3, 7, 99]))
        if self._rarely():
            numbers = [0, 1, 3, 7, 49, 50, 51, 2**63, 2**64 - 1]
            message.rows.start, message.rows.stop = self._pick(numbers), self._pick(numbers)
        if self._rarely():
            codes, values = self._program(3, 0)
            message.loss_function.codes = bytes(codes)
            message.loss_function.values = np.array(values, "<f8").tobytes()
            message.loss_function.closing = self._pick([0, 1, 2, 3, 4, 9])
        return message

    def _programs(self) -> pb.Programs:
        count = self._pick([1, 1, 2, 5, 20, 0 if self._rarely() else 3])
        vectors = self._pick([0, 1, 1, 2, 5])
        codes: list[int] = []
        values: list[float] = []
        lengths, counts, parameters = [], [], []
        for _ in range(count):
            n = self._random.randrange(4)
            program = self._program(2, n)
            codes += program[0]
            values += program[1]
            lengths.append(len(program[0]))
            counts.append(n)
            parameters += [self._number() for _ in range(n * max(1, vectors))]
        if self._rarely() and codes:
            codes[self._random.randrange(len(codes))] = self._random.randrange(256)
        for numbers in (lengths, counts):
            if self._random.random() < 0.05 and numbers:
                at = self._random.randrange(len(numbers))
                numbers[at] = self._pick([0, 1, numbers[at] + 1, 2**31, 2**32 - 1])
        return pb.Programs(
            codes=bytes(codes),
            values=np.array(values, "<f8").tobytes(),
            lengths=np.array(lengths, "<u4").tobytes(),
            parameter_counts=np.array(counts, "<u4").tobytes(),
            parameters=np.array(parameters, "<f8").tobytes(),
            vectors=vectors if self._random.random() < 0.97 else self._pick([3, 51, 2**32 - 1]),
        )

    def _program(self, variables: int, parameters: int) -> tuple[list[int], list[float]]:
        """Make a postfix program, now and then with an index that is out of range."""
        codes: list[int] = []
        values: list[float] = []
        depth, tokens = 0, self._pick([1, 3, 8, 20, 60])
        while len(codes) < tokens or depth > 1:
            arity = self._random.randrange(4) if len(codes) < tokens else min(depth, 3)
            if arity > depth or arity == 0:
                kind = self._random.choice([1, 1, 2, 3] if parameters else [1, 1, 3])
                codes.append(kind)
                limit = {1: variables, 2: parameters}.get(kind)
                values.append(self._number() if limit is None else self._index(limit))
                depth += 1
            else:
                codes.append(self._pick({1: _UNARY, 2: _BINARY, 3: _TERNARY}[arity]))
                values.append(0.0)
                depth -= arity - 1
        return codes, values

    def _index(self, limit: int) -> float:
        return float(self._random.randrange(limit)) if self._random.random() < 0.995 else limit

    def _number(self) -> float:
        return self._pick(_ODD) if self._random.random() < 0.3 else self._random.gauss(0, 3)

    def _content_id(self) -> bytes:
        if self._random.random() < 0.03:
            return self._random.randbytes(self._pick([0, 1, 31, 32, 33]))
        return self._pick(DATASETS).content_id

    def _break_header(self, header: pb.UploadHeader) -> None:
        kind = self._random.randrange(6)
        if kind == 0:
            header.content_id = self._random.randbytes(self._pick([0, 31, 32]))
        elif kind == 1:
            header.layout.rows = self._pick([0, 1, 2**40, 2**63, 2**64 - 1])
        elif kind == 2:
            header.layout.variables = self._pick([0, 1, 2**40, 2**64 - 1])
        elif kind == 3:
            header.layout.dtype = self._pick([0, 1, 2, 3, 77])
        elif kind == 4:
            header.layout.names.extend(self._pick([["a"], ["a", "a"], ["", "x1"], ["é" * 50]]))
        else:
            header.layout.has_target = not header.layout.has_target
            header.layout.has_weights = self._rarely()

    def _mutate(self, message: bytes) -> bytes:
        data = bytearray(message)
        for _ in range(self._pick([1, 1, 2, 8])):
            if not data:
                break
            at = self._random.randrange(len(data))
            kind = self._random.randrange(5)
            if kind == 0:
                data[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                data[at] = self._random.randrange(256)
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                del data[at : at + self._random.randrange(1, 9)]
            else:
                data[at:at] = data[at : at + self._random.randrange(1, 40)]
        return bytes(data)

    def _pick(self, choices: list[Any]) -> Any:
        return self._random.choice(choices)

    def _rarely(self) -> bool:
        return self._random.random() < 0.1
