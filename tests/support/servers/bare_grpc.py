"""A gRPC server that computes nothing, in a process of its own: the least that a call can cost."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

#: Options of a channel or server whose messages may have any size.
NO_LIMIT = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@contextmanager
def bare_server(script: str, *words: str) -> Iterator[str]:
    """Run a script that calls `serve`; yield its address."""
    command, pipe = [sys.executable, script, *words], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=pipe, stdin=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.communicate(timeout=30)


def serve(
    service: str, methods: Mapping[str, Any], options: Sequence[tuple[str, Any]] = ()
) -> None:
    """Be that server until standard input ends; print its port."""
    server = grpc.server(ThreadPoolExecutor(8), options=options)  # some for calls that stay open
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)
