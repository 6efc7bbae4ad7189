"""Statuses of errors as general gRPC tools read them."""

from unittest.mock import Mock
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from warpfit.codec import ERROR_METADATA_KEY
from warpfit.errors import (
    CancelledError,
    InvalidArgumentError,
    ProgramError,
    ResourceExhaustedError,
)
from warpfit_server.rpc.calls import fail_call


def sent_status(error):
    """Return the status that a failed call is sent, serialized."""
    context = Mock()
    context.code.return_value = None
    fail_call(context, error, (("x-request-id", "1"),))
    (metadata,) = context.set_trailing_metadata.call_args.args
    assert [key for key, _ in metadata] == ["x-request-id", ERROR_METADATA_KEY]
    return metadata[1][1]


class FailedCall:
    """A failed call as `grpc_status` wants it."""

    def __init__(self, error):
        self._error = error

    def code(self):
        return grpc.StatusCode[self._error.status]

    def details(self):
        return str(self._error)

    def trailing_metadata(self):
        return ((ERROR_METADATA_KEY, sent_status(self._error)),)


def unpack(error, kind):
    """Return the detail of a kind that the status of an error has, or None."""
    status = rpc_status.from_call(FailedCall(error))
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


def test_a_wrong_token_is_a_field_violation_with_its_place():
    error = ProgramError("what", "STACK_UNDERFLOW", "mend", "programs", 3, 4)
    violation = unpack(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("programs[3].tokens[4]", "what")
    info = unpack(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("STACK_UNDERFLOW", "warpfit")
    assert (info.metadata["remedy"], info.metadata["token"]) == ("mend", "4")


def test_an_exceeded_limit_is_a_quota_failure_with_a_retry_delay():
    error = ResourceExhaustedError("what", "QUEUE_FULL", needed=5, available=3, retry_after=1.5)
    delay = unpack(error, error_details_pb2.RetryInfo).retry_delay
    assert delay.ToNanoseconds() == 1_500_000_000
    assert unpack(error, error_details_pb2.QuotaFailure).violations[0].subject == "QUEUE_FULL"
    assert unpack(error, error_details_pb2.ErrorInfo).metadata["needed"] == "5"
    assert unpack(error, error_details_pb2.BadRequest) is None


@pytest.mark.parametrize("character", ["x", "\u20ac", "\n"])
def test_an_error_that_quotes_much_fits_the_metadata_of_a_call(character):
    much = character * 100_000
    error = InvalidArgumentError(much, much, much, much, 1 << 70, 1 << 70, 1 << 70, 1 << 70)
    printable = "".join(chr(c) for c in range(32, 127) if chr(c) != "%")
    message = quote(str(error), safe=printable)  # as gRPC encodes the message of a status
    encoded = 4 * -(-len(sent_status(error)) // 3)
    assert len(message) + encoded < 7_500
    assert error.message.endswith("...")


@pytest.mark.parametrize(("remaining", "status"), [(0.0, "DEADLINE_EXCEEDED"), (1.0, "CANCELLED")])
def test_a_call_whose_deadline_has_passed_is_not_called_cancelled(remaining, status):
    context = Mock()
    context.code.return_value = None
    context.time_remaining.return_value = remaining
    fail_call(context, CancelledError("the call has ended", "CANCELLED"), ())
    context.set_code.assert_called_once_with(grpc.StatusCode[status])
