"""Encoding and decoding of data sets and of the calls that upload, find and release them."""

import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from warpfit.codec.framing import (
    broken_answer,
    decodes_answer,
    parse_message,
    read_varint,
    varint,
)
from warpfit.dataset import DTYPE_CODES, DTYPES, ClientDataset, DatasetReference, Layout, ServerFile
from warpfit.errors import InvalidArgumentError
from warpfit.v1 import evaluator_pb2 as pb

CONTENT_ID_BYTES: Final = 32
#: Field 2 (``data``) of UploadVariablesRequest, wire type 2.
_DATA_TAG: Final = bytes([2 << 3 | 2])


def layout_to_message(layout: Layout) -> pb.DatasetLayout:
    """Encode a data set's shape."""
    return pb.DatasetLayout(
        dtype=DTYPE_CODES[layout.dtype],
        variables=layout.variables,
        rows=layout.rows,
        has_target=layout.has_target,
        has_weights=layout.has_weights,
        names=layout.names,
    )


def layout_from_message(message: pb.DatasetLayout) -> Layout:
    """Decode and check a data set's shape; raise InvalidArgumentError if it is none."""
    layout = Layout(
        dtype=_dtype(message.dtype, "layout.dtype"),
        variables=message.variables,
        rows=message.rows,
        has_target=message.has_target,
        has_weights=message.has_weights,
        names=tuple(message.names),
    )
    layout.check()
    return layout


def _dtype(code: int, field: str) -> np.dtype[Any]:
    if code not in DTYPES:
        raise InvalidArgumentError(
            f"dtype {code} is not supported",
            "BAD_DTYPE",
            "Send DTYPE_FLOAT32 or DTYPE_FLOAT64",
            field,
        )
    return DTYPES[code]


def upload_messages(dataset: ClientDataset, chunk_bytes: int) -> Iterator[bytes]:
    """Serialize an upload: the header, then the payload in pieces of ``chunk_bytes``.

    The pieces are framed by hand, because protobuf would copy each of them twice more.
    """
    layout = layout_to_message(dataset.layout)
    header = pb.UploadHeader(layout=layout, content_id=dataset.content_id)
    yield pb.UploadVariablesRequest(header=header).SerializeToString()
    for chunk in dataset.chunks(chunk_bytes):
        yield b"".join((_DATA_TAG, varint(len(chunk)), chunk))


def open_message(file: ServerFile) -> pb.OpenDatasetRequest:
    """Encode the request of OpenDataset."""
    return pb.OpenDatasetRequest(
        name=file.name,
        x=file.x,
        y=file.y,
        weights=file.weights,
        dtype=pb.DTYPE_UNSPECIFIED if file.dtype is None else DTYPE_CODES[file.dtype],
    )


def open_request(message: pb.OpenDatasetRequest) -> ServerFile:
    """Decode the request of OpenDataset; raise InvalidArgumentError for an unknown dtype."""
    dtype = None if message.dtype == pb.DTYPE_UNSPECIFIED else _dtype(message.dtype, "dtype")
    columns = tuple(message.x), message.y, message.weights
    return ServerFile(message.name, *columns, dtype)


@decodes_answer
def opened_dataset(message: pb.DatasetInfo, file: ServerFile) -> DatasetReference:
    """Decode the answer to OpenDataset; raise InternalError if it is not what was asked for."""
    layout = layout_from_message(message.layout)
    asked = bool(file.y), bool(file.weights), file.dtype or layout.dtype
    if (layout.has_target, layout.has_weights, layout.dtype) != asked:
        raise broken_answer("has another layout than was asked for")
    if file.x and layout.names != tuple(file.x):
        raise broken_answer("has other variables than were asked for")
    controls = {c for c in "".join(layout.names) if unicodedata.category(c) == "Cc"}
    if not file.x and controls - set("\t\r\n"):
        raise broken_answer("has names with control characters, which the file may have: give x=")
    chosen = replace(file, dtype=layout.dtype)
    return DatasetReference(layout, check_content_id(message.content_id), chosen)


@decodes_answer
def check_dataset(dataset: ClientDataset, message: pb.DatasetInfo) -> None:
    """Check the answer to a call that makes a data set resident, or finds it.

    Raises:
        InternalError: if it is about another data set.
    """
    if message.content_id != dataset.content_id:
        raise broken_answer("is about another data set")
    if layout_from_message(message.layout) != dataset.layout:
        raise broken_answer("has another layout than the data set")


def get_message(dataset: ClientDataset) -> pb.GetVariablesRequest:
    """Encode the request of GetVariables."""
    return pb.GetVariablesRequest(content_id=dataset.content_id)


def release_message(
    dataset: ClientDataset, *, everywhere: bool = False
) -> pb.ReleaseVariablesRequest:
    """Encode the request of ReleaseVariables."""
    return pb.ReleaseVariablesRequest(content_id=dataset.content_id, everywhere=everywhere)


def release_response() -> pb.ReleaseVariablesResponse:
    """Encode the answer to ReleaseVariables."""
    return pb.ReleaseVariablesResponse()


def upload_data(message: bytes) -> memoryview:
    """Return the payload bytes of a message of an upload after the first, without copying."""
    length, start = read_varint(message, 1)
    if message[:1] == _DATA_TAG and start + length == len(message):
        return memoryview(message)[start:]
    parsed = parse_message(pb.UploadVariablesRequest, message)  # other encodings of the same
    if parsed.WhichOneof("part") != "data":
        raise InvalidArgumentError(
            "a message of the upload after the first carries no data",
            "BAD_HEADER",
            "Send one header, then only messages with `data`",
            "header",
        )
    return memoryview(parsed.data)


def upload_start(data: bytes) -> tuple[Layout, bytes]:
    """Return layout and content id of the first message of an upload."""
    return upload_header(parse_message(pb.UploadVariablesRequest, data, most_fields=None))


def upload_header(message: pb.UploadVariablesRequest) -> tuple[Layout, bytes]:
    """Decode the first message of an upload, once it is parsed; see `upload_start`."""
    if message.WhichOneof("part") != "header":
        raise InvalidArgumentError(
            "the upload does not start with a header",
            "BAD_HEADER",
            "Send one message with `header` first, then messages with `data`",
            "header",
        )
    content_id = check_content_id(message.header.content_id)
    return layout_from_message(message.header.layout), content_id


def check_content_id(content_id: bytes) -> bytes:
    """Return a content id of the right length; raise InvalidArgumentError for any other length."""
    if len(content_id) != CONTENT_ID_BYTES:
        raise InvalidArgumentError(
            f"content_id has {len(content_id)} bytes, not {CONTENT_ID_BYTES}",
            "BAD_DATASET_ID",
            "Send the SHA-256 of the data set",
            "content_id",
        )
    return content_id


def dataset_info(content_id: bytes, layout: Layout, lost_digits: str = "") -> pb.DatasetInfo:
    """Encode the answer to UploadVariables, OpenDataset and GetVariables."""
    return pb.DatasetInfo(
        content_id=content_id,
        layout=layout_to_message(layout),
        lost_digits=lost_digits,
    )
