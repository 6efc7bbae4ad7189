"""A row of weight 0 counts nowhere, whatever is in it: on a server, and in `warpfit.testing`."""

import numpy as np
import pytest

import warpfit
import warpfit.testing

ROWS = 5_000
rng = np.random.default_rng(3)
X = rng.uniform(0.5, 2.0, size=(ROWS, 2))
Y = 2.0 * X[:, 0] + 0.3 * np.log(X[:, 1]) + 0.01 * rng.normal(size=ROWS)
WEIGHTS = rng.uniform(0.5, 2.0, size=ROWS)
PROGRAMS = ["p1*x1 + p2*log(x2)", "x1/x2", "2*x1", "p1*sqrt(x2)"]
STARTS = [[0.5, 0.5], [], [], [1.0]]
#: Places of rows without a weight: the first one, a whole block and more, some, all but a few.
PLACES = {
    "first": np.arange(1),
    "first block": np.arange(2_500),
    "some": np.arange(3, ROWS, 7),
    "most": np.setdiff1d(np.arange(ROWS), [17, 1800, 1801, 4000, 4999, 4998]),
}
#: What is there in the variables and the target; 0 is a pole of the programs.
JUNK = {"nan": np.nan, "inf": -np.inf, "zero": 0.0, "fill value": 9.96921e36}


@pytest.fixture(scope="module", params=["server", "reference"])
def client(request):
    if request.param == "reference":
        yield warpfit.testing.client()
        return
    with warpfit.connect(request.getfixturevalue("server").address) as connected:
        yield connected


def spoilt(place, junk):
    x, y, w = X.copy(), Y.copy(), WEIGHTS.copy()
    x[PLACES[place]], y[PLACES[place]], w[PLACES[place]] = JUNK[junk], JUNK[junk], 0.0
    return x, y, w


@pytest.mark.parametrize("rows", [(0, 17), (1000, 3049)])
def test_a_range_of_rows_has_the_losses_of_a_data_set_of_its_own(client, rows):
    """Sums are added up by blocks that begin at fixed rows, so that the last bits may differ."""
    own = slice(*rows)
    data = client.upload(X, Y, WEIGHTS, dtype="float64")
    other = client.upload(X[own], Y[own], WEIGHTS[own], dtype="float64")
    for loss in ("mse", "r2", "mae", "w*abs(d)^1.5"):
        found = client.run(data, PROGRAMS, STARTS, loss=loss, rows=rows).losses
        wanted = client.run(other, PROGRAMS, STARTS, loss=loss).losses
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


@pytest.mark.parametrize(("place", "missing"), [("first block", "refuse"), ("most", "drop")])
def test_the_evidence_is_that_of_the_rows_with_a_weight(client, place, missing):
    """A row of weight 0 counts as one that is not there, also where a formula has no value."""
    x, y, w = spoilt(place, "nan")
    kept = w > 0
    fits = [
        client.optimize(
            client.upload(*rows, dtype="float64"), PROGRAMS, STARTS, evidence=True, missing=missing
        )
        for rows in ((x, y, w), (x[kept], y[kept], w[kept]))
    ]
    assert_same_fits(*fits)


def assert_same_fits(found, wanted):
    np.testing.assert_array_equal(found.loss, wanted.loss)
    for name in ("rows", "log_likelihood", "bic", "description_length", "variance", "freedom"):
        np.testing.assert_array_equal(
            getattr(found.evidence, name), getattr(wanted.evidence, name), err_msg=name
        )
    for got, want in zip(found.parameters, wanted.parameters, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(
        found.evidence.standard_errors, wanted.evidence.standard_errors, strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert found.evidence.warnings == wanted.evidence.warnings


@pytest.mark.parametrize(
    ("place", "junk", "dtype"),
    [
        *(("first", "nan", "float64"), ("first block", "inf", "float32")),
        *(("some", "zero", "float64"), ("most", "fill value", "float32")),
    ],
)
def test_all_sums_are_those_of_the_other_rows(client, place, junk, dtype):
    x, y, w = spoilt(place, junk)
    data = client.upload(x, y, w, dtype=dtype)
    kept = w > 0
    other = client.upload(x[kept], y[kept], w[kept], dtype=dtype)
    for loss in ("mse", "r2", "nmse", "mae", "gaussian", "w*abs(d)^1.5"):
        for options in ({}, {"gradient": True, "variable_gradient": True}):
            got = client.run(data, PROGRAMS, STARTS, loss=loss, **options)
            want = client.run(other, PROGRAMS, STARTS, loss=loss, **options)
            np.testing.assert_array_equal(got.losses, want.losses, err_msg=loss)
            assert np.isfinite(got.losses).all()
            if options:
                np.testing.assert_array_equal(got.variable_gradients, want.variable_gradients)
                for mine, its in zip(got.gradients, want.gradients, strict=True):
                    np.testing.assert_array_equal(mine, its)
    options = {"loss": "mse", "linear_scaling": True, "correlation": True}
    got, want = (client.run(one, PROGRAMS, STARTS, **options) for one in (data, other))
    for name in ("losses", "slopes", "intercepts", "correlations"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_sums_over_no_row_are_zero(client):
    data = client.upload([[np.nan], [2.0], [1.0]], [1.0, np.nan, 1.0], [0.0, 0.0, 2.0])
    for one, rows in ((data, (0, 2)), (client.upload([[np.nan]], [1.0], [0.0]), None)):
        assert client.evaluate(one, ["x1"], loss="sse", rows=rows) == [0.0]
        assert np.isnan(client.evaluate(one, ["x1"], loss="mse", rows=rows)).all()
        fit = client.optimize(one, ["p1*x1"], [[1.0]], rows=rows)
        assert fit.reason == [warpfit.Reason.NOT_FINITE]
