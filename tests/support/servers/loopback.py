"""A real gRPC server on loopback that answers from `warpfit.testing.InProcessServer`."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from warpfit import codec
from warpfit.errors import WarpfitError
from warpfit.testing import InProcessServer
from warpfit.transport.call import Request
from warpfit.v1 import evaluator_pb2 as pb


class Servicer:
    """Hands every call to ``server``; if ``hang`` is true, an evaluation waits for its end."""

    def __init__(self, server: InProcessServer) -> None:
        self.server = server
        self.metadata: dict[str, str] = {}
        """Of the last request that was a call of its own."""
        self.hang = False
        self.hangs = threading.Event()
        self.cancelled = threading.Event()

    def handler(self, method):
        """Return gRPC's handler of a method of the contract."""
        ends = method.client_streaming, method.server_streaming
        way = "_".join("stream" if streams else "unary" for streams in ends)
        takes_bytes = method.name in ("Evaluate", "Optimize", "UploadVariables")
        parse = None if takes_bytes else GetMessageClass(method.input_type).FromString
        serialize = GetMessageClass(method.output_type).SerializeToString
        make = getattr(grpc, f"{way}_rpc_method_handler")
        return make(partial(self._call, method), parse, serialize)

    def _call(self, method, request, context):
        self.metadata = dict(context.invocation_metadata())
        if method.client_streaming and method.server_streaming:
            request = next(request)  # each call answers one request
        if method.name == "Evaluate" and self.hang:
            context.add_callback(self.cancelled.set)
            self.hangs.set()
            self.cancelled.wait(30)
        try:
            messages = self.server.answer(Request(method.name, request, list))
        except WarpfitError as error:
            metadata = [(codec.ERROR_METADATA_KEY, codec.error_to_status(error))]
            context.set_trailing_metadata(metadata)
            context.abort(grpc.StatusCode[error.status], error.message)
        return iter(messages) if method.server_streaming else messages[0]


def fail_calls(server: InProcessServer, method: str, *failures: WarpfitError | None) -> None:
    """Make the next calls of a method fail, each with an error, UNAVAILABLE for None.

    Unlike those of `InProcessServer.fail`, the failures spare the question that a client asks of
    its own accord before a call: GetServerInfo, after UNAVAILABLE or a silence.
    """
    answer, left = server.answer, list(failures)

    def failing(request: Request) -> Any:
        if request.method == method and left:
            server.fail(error=left.pop(0))
        return answer(request)

    server.answer = failing  # type: ignore[method-assign]


@contextmanager
def serve(server: InProcessServer, message_bytes: int = 4 << 20, port: int = 0):
    """Serve on a port, by default a free one; yields its address and the servicer."""
    options = [("grpc.max_receive_message_length", message_bytes)]
    grpc_server, servicer = grpc.server(ThreadPoolExecutor(4), options=options), Servicer(server)
    service = pb.DESCRIPTOR.services_by_name["Evaluator"]
    handlers = {method.name: servicer.handler(method) for method in service.methods}
    grpc_server.add_registered_method_handlers(service.full_name, handlers)
    port = grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    grpc_server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        grpc_server.stop(None).wait()
