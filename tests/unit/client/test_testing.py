"""The in-process server that is shipped for users' own tests."""

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warpfit
from support.engines.operators import programs
from support.refusals import refused
from warpfit import codec, testing
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.server_info import Limits
from warpfit.transport.call import Request

X = np.random.default_rng(8).uniform(0.1, 3, size=(20, 3))


@given(
    st.lists(programs(variables=3, parameters=2), min_size=1, max_size=4),
    st.sampled_from(["float32", "float64"]),
)
def test_random_programs_are_answered_in_the_datas_dtype(batch, dtype):
    parameters = [np.linspace(0.5, 2, program.parameters) for program in batch]
    with testing.client() as client:
        values = client.evaluate(client.upload(X, dtype=dtype), batch, parameters)
    expected = reference.evaluate_programs(batch, X.T.astype(dtype), parameters)
    assert values.dtype == dtype
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values.T, expected.astype(dtype))


def test_faults_are_used_up_in_order():
    server = testing.InProcessServer()
    server.fail(calls=1, error=warpfit.CancelledError("first", "CANCELLED"))
    server.fail(calls=1, error=warpfit.InternalError("second", "INTERNAL"))
    with testing.client(server) as client:
        with pytest.raises(warpfit.CancelledError):
            client.info()
        with pytest.raises(warpfit.InternalError):
            client.info()
        assert client.info().limits == Limits()
    assert server.calls == ["GetServerInfo"] * 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sent, _: sent[1:], "BAD_HEADER"),
        (lambda sent, _: sent[:-1], "BAD_DIGEST"),
        (lambda sent, _: [*sent, sent[-1]], "BAD_DIGEST"),
        (lambda sent, other: [sent[0], *other[1:]], "BAD_DIGEST"),
        (lambda sent, _: [*sent[:2], sent[0], *sent[2:]], "BAD_HEADER"),
    ],
)
def test_the_upload_is_checked(change, reason):
    sent, other = (list(codec.upload_messages(Dataset.of(x), 100)) for x in (X, X + 1))
    refused(
        reason,
        lambda: testing.InProcessServer().answer(
            Request("UploadVariables", iter(change(sent, other)))
        ),
    )


def test_the_server_package_is_not_needed():
    code = """
import sys
import warnings
sys.modules["warpfit_server"] = None
import warpfit
with warpfit.testing.client() as client:
    data = client.upload([[1.0, 2.0]], [3.0])
    assert client.evaluate(data, "x1 + x2", loss="mse")[0] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_warning_of_numpy_reaches_callers():
    columns = [[0.0, 1.0, 0.0], [np.inf, 1.0, -np.inf], [1e300, 2e300, 3e300], [0.0, 0.0, 0.0]]
    outputs = dict.fromkeys(("values", "reductions", "correlation", "linear_scaling"), True)
    with testing.client() as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", warpfit.PrecisionWarning)
        for x, y in itertools.product(columns, columns):
            data = client.upload(np.array(x)[:, None], y)
            answer = client.run(data, ["1/x1", "log(x1)", "exp(1000*x1)"], loss="mse", **outputs)
            assert repr(answer) and repr(answer.reductions)
            fit = client.optimize(data, "p1*x1", covariance=True, max_iterations=2)
            assert repr(fit) and len(fit.band([[1.0]]).low) == 1
