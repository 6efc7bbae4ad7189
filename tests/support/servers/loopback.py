"""A real gRPC server on loopback that answers from `warpfit.testing.InProcessServer`."""

# ruff: noqa: N802 (the methods' names come from the contract)

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from warpfit import codec
from warpfit.errors import WarpfitError
from warpfit.testing import InProcessServer
from warpfit.transport.call import Call
from warpfit.v1 import evaluator_pb2_grpc


class _Messages(list):
    add = list.append


class Servicer(evaluator_pb2_grpc.EvaluatorServicer):
    """Hands every call to ``server``; if ``hang`` is true, an evaluation waits for its end."""

    def __init__(self, server: InProcessServer) -> None:
        self.server = server
        self.hang = False
        self.hangs = threading.Event()
        self.cancelled = threading.Event()

    def UploadVariables(self, requests, context):
        serialized = (request.SerializeToString() for request in requests)
        return self._answer("UploadVariables", serialized, context)[0]

    def OpenDataset(self, request, context):
        return self._answer("OpenDataset", request, context)[0]

    def GetVariables(self, request, context):
        return self._answer("GetVariables", request, context)[0]

    def ReleaseVariables(self, request, context):
        return self._answer("ReleaseVariables", request, context)[0]

    def GetServerInfo(self, request, context):
        return self._answer("GetServerInfo", request, context)[0]

    def Evaluate(self, request, context):
        if self.hang:
            context.add_callback(self.cancelled.set)
            self.hangs.set()
            self.cancelled.wait(30)
        yield from self._answer("Evaluate", request.SerializeToString(), context)

    def Optimize(self, request, context):
        yield from self._answer("Optimize", request, context)

    def _answer(self, method, request, context):
        messages = _Messages()
        try:
            self.server.answer(Call(method, request, messages, None))
        except WarpfitError as error:
            context.set_trailing_metadata(
                [(codec.ERROR_METADATA_KEY, codec.error_to_detail(error))]
            )
            context.abort(grpc.StatusCode[error.status], error.message)
        return messages


@contextmanager
def serve(
    server: InProcessServer, message_bytes: int = 4 << 20, port: int = 0
) -> Iterator[tuple[str, Servicer]]:
    """Serve on a port, by default a free one; yields its address and the servicer."""
    grpc_server = grpc.server(
        ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", message_bytes)]
    )
    servicer = Servicer(server)
    evaluator_pb2_grpc.add_EvaluatorServicer_to_server(servicer, grpc_server)
    port = grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    grpc_server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        grpc_server.stop(None).wait()
