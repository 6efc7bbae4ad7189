"""The conversion between warpfit's types and the protobuf messages of evaluator.proto."""

from warpfit.codec.answers import (
    EXTRAS,
    WHOLE_BYTES,
    answer_from_bytes,
    array_pieces,
    is_one_message,
    read_result,
    result_end,
    result_start,
    timings_from_message,
)
from warpfit.codec.datasets import (
    check_content_id,
    check_dataset,
    dataset_info,
    get_message,
    layout_from_message,
    layout_to_message,
    open_message,
    open_request,
    opened_dataset,
    release_message,
    release_response,
    upload_data,
    upload_header,
    upload_messages,
    upload_start,
)
from warpfit.codec.errors import (
    ERROR_METADATA_KEY,
    detail_of_status,
    error_from_status,
    error_to_status,
)
from warpfit.codec.fits import (
    fit_answer_from_bytes,
    fit_from_message,
    fit_to_bytes,
    fit_to_message,
    progress_to_bytes,
    read_fit,
)
from warpfit.codec.framing import broken_answer, parse_message, printable
from warpfit.codec.requests import (
    evaluation_from_bytes,
    evaluation_from_message,
    evaluation_to_bytes,
    evaluation_to_message,
)
from warpfit.codec.server_info import (
    info_from_message,
    info_request,
    info_to_message,
    operator_infos,
)
