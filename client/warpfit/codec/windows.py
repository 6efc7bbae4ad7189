"""Shared memory: pieces of windows in requests, and the packets that open a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from warpfit.codec.datasets import layout_to_message
from warpfit.codec.failures import error_from_detail, error_to_detail
from warpfit.codec.framing import parse_message
from warpfit.dataset import Dataset
from warpfit.errors import InvalidArgumentError, PermissionDeniedError, WarpfitError
from warpfit.v1 import evaluator_pb2 as pb

#: Longest packet on the socket of windows.
WINDOW_PACKET_BYTES: Final = 4096
#: Reason of the error for a window that the server does not know (any more).
WINDOW_UNKNOWN: Final = "WINDOW_UNKNOWN"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``offset`` to ``offset + size`` of a window."""

    window: bytes
    """Its id."""
    offset: int
    size: int


def evaluation_into(message: bytes, piece: Piece) -> bytes:
    """Ask in a serialized evaluation for the matrices in a piece of a window."""
    return message + pb.EvaluateRequest(window=_to_message(piece)).SerializeToString()


def evaluation_piece(message: pb.EvaluateRequest) -> Piece | None:
    """Where an evaluation wants its matrices; None for in the answer."""
    return _from_message(message.window) if message.HasField("window") else None


def written_to_bytes(size: int) -> bytes:
    """Serialize how many bytes of an answer's piece are final."""
    return pb.EvaluateResponse(written=size).SerializeToString()


def upload_from(dataset: Dataset, piece: Piece) -> bytes:
    """Serialize the header of an upload whose payload lies in a window."""
    header = pb.UploadHeader(
        layout=layout_to_message(dataset.layout),
        content_id=dataset.content_id,
        window=_to_message(piece),
    )
    return pb.UploadVariablesRequest(header=header).SerializeToString()


def filled_to_bytes(size: int) -> bytes:
    """Serialize how many bytes of an upload's payload lie in its piece."""
    return pb.UploadVariablesRequest(filled=size).SerializeToString()


def upload_piece(message: pb.UploadVariablesRequest) -> Piece | None:
    """Where the payload of an upload lies; None for in its messages."""
    header = message.header
    return _from_message(header.window) if header.HasField("window") else None


def filled_from_bytes(data: bytes) -> int:
    """Decode a message, after the first, of an upload whose payload lies in a window.

    Raises:
        InvalidArgumentError: if it says nothing about the window.

    """
    message = parse_message(pb.UploadVariablesRequest, data)
    if message.WhichOneof("part") != "filled":
        raise InvalidArgumentError(
            "the payload was to lie in a window, and a message does not say how much does",
            "BAD_HEADER",
            "After a header with `window` send only messages with `filled`",
            "filled",
        )
    return int(message.filled)


def open_window(ticket: bytes) -> bytes:
    """Serialize the packet that opens a window."""
    return pb.OpenWindow(ticket=ticket).SerializeToString()


def ticket_of(packet: bytes) -> bytes:
    """Decode the packet that opens a window.

    Raises:
        InvalidArgumentError: if it is none.

    """
    return bytes(parse_message(pb.OpenWindow, packet).ticket)


def window_opened(window: bytes) -> bytes:
    """Serialize the answer to a window that was opened."""
    return pb.WindowOpened(id=window).SerializeToString()


def window_refused(error: WarpfitError) -> bytes:
    """Serialize the answer to a window that was refused."""
    detail = pb.ErrorDetail.FromString(error_to_detail(error))
    return pb.WindowOpened(error=detail).SerializeToString()


def opened_window(packet: bytes) -> bytes:
    """Decode the answer to a window; return its id.

    Raises:
        PermissionDeniedError: if it was refused, with the server's reason.

    """
    answer = parse_message(pb.WindowOpened, packet)
    if answer.HasField("error"):
        raise error_from_detail(PermissionDeniedError, answer.error.SerializeToString())
    return bytes(answer.id)


def _to_message(piece: Piece) -> pb.WindowPiece:
    return pb.WindowPiece(id=piece.window, offset=piece.offset, size=piece.size)


def _from_message(message: pb.WindowPiece) -> Piece:
    return Piece(bytes(message.id), message.offset, message.size)
