"""Fake calls as gRPC method handlers see them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from warpfit import codec
from warpfit.transport.security import new_token
from warpfit.v1 import evaluator_pb2 as pb

#: Messages of a client that sends none, and goes on waiting.
SILENT: Final[Sequence[None]] = (None,)


class Call:
    """A call's context, its messages and what it has been answered.

    Args:
        given: its messages; None if nothing may ask for them. From a None among them on the client
            is silent, until it goes or the call ends.
        token: bearer token.
        metadata: further metadata.
        code: status that it has from the beginning.
        active: whether its client is there.
        remaining: seconds to its deadline.
        cancel_after: the client goes after as many messages of the answer.
        pause: seconds that each of them takes on its way.
    """

    def __init__(
        self,
        given: Sequence[bytes | None] | None,
        token: str = "",
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        code: grpc.StatusCode | None = None,
        active: bool = True,
        remaining: float | None = None,
        cancel_after: int = 0,
        pause: float = 0.0,
    ) -> None:
        self._given = given
        self._messages = self._each()
        self._metadata = metadata + ((("authorization", f"Bearer {token}"),) if token else ())
        self._code = code
        self._active = active
        self._remaining = remaining
        self._cancel_after = cancel_after
        self._pause = pause
        self._sent: list[bytes] = []
        self._ended = threading.Event()
        self._over = threading.Event()  # ended, or the client has gone
        self._callbacks: list[Callable[[], None]] = []
        self.trailing: tuple[tuple[str, Any], ...] = ()
        self.details = ""

    @property
    def context(self) -> "Call":
        """The context of the call, which this is, too."""
        return self

    @property
    def messages(self) -> Iterator[bytes]:
        """What the client sends."""
        return self._messages

    def receive(self, deliver: Callable[[bytes | None], None]) -> None:
        """Deliver the next message, at once if the client is not silent."""

        def wait() -> None:
            try:
                message = next(self._messages, None)
            except grpc.RpcError:
                message = None
            deliver(message)

        if self._given is not None and None in self._given:
            threading.Thread(target=wait).start()
        else:
            wait()

    def _each(self) -> Iterator[bytes]:
        assert self._given is not None, "nobody may read this call's messages"
        for message in self._given:
            if message is None:
                self._over.wait(10)
                if not self._active:
                    raise grpc.RpcError
                return
            yield message

    def end(self, message: bytes | None = None) -> None:
        """Take the last message of the answer, and the status."""
        if message is not None:
            self.send(message)
        assert not self._ended.is_set(), "the call has ended already"
        self._ended.set()
        self._over.set()

    def send(self, message: bytes) -> None:
        """Take a message of the answer."""
        time.sleep(self._pause)
        self._sent.append(message)
        if len(self._sent) == self._cancel_after:
            self.cancel()

    def cancel(self) -> None:
        """Let the client go."""
        self._active = False
        self._over.set()
        for callback in self._callbacks:
            callback()

    def wait(self) -> None:
        """Wait for the end of the answer."""
        assert self._ended.wait(10)

    def answer(self, *, wait: bool = True) -> tuple[str, list[bytes]]:
        """Status and messages of the answer; without ``wait`` it must have ended already."""
        assert self._ended.wait(10 if wait else 0)
        return "OK" if self._code is None else self._code.name, self._sent

    def detail(self) -> pb.ErrorDetail:
        """What the answer says about its error."""
        return pb.ErrorDetail.FromString(dict(self.trailing)[codec.ERROR_METADATA_KEY])

    # --------------------------------------------------------------- what handlers see of gRPC

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def set_trailing_metadata(self, metadata: tuple[tuple[str, Any], ...]) -> None:
        self.trailing = metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def set_details(self, details: str) -> None:
        self.details = details

    def is_active(self) -> bool:
        return self._active

    def time_remaining(self) -> float | None:
        return self._remaining

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


def token_file(folder: Path, *tenants: str) -> tuple[str, dict[str, str]]:
    """Write a token file; return its path and each tenant's token."""
    made = {tenant: new_token(tenant) for tenant in tenants}
    path = folder / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    path.chmod(0o600)
    return str(path), {tenant: token for tenant, (token, _) in made.items()}


def tenants_file(folder: Path, text: str) -> str:
    """Write a tenants file; return its path."""
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)
