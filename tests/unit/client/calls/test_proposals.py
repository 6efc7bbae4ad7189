"""Each skeleton of `propose` gets its own answer, and none spoils those of the others."""

import json
import math

import numpy as np
import pytest

import warpfit
import warpfit.testing
from warpfit import DeadlineExceededError, Program, RetryPolicy, UnavailableError
from warpfit.calls import proposals
from warpfit.codec import fit_from_bytes
from warpfit.ops import OPERATORS

NAMES = ("a", "b", "k")
ROWS = 60


def table(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.5, 2.0, (ROWS, 3))
    X[:, 2] = 4.0
    return X, 2.0 * np.exp(0.5 * X[:, 0]) + X[:, 1] + rng.normal(0.0, 0.01, ROWS)


def proposed(rows, skeletons, names=NAMES, server=None, **options):
    briefly = RetryPolicy(total_seconds=0.1, initial_backoff=0.001, maximum_backoff=0.01)
    with warpfit.testing.client(server, retry=briefly) as client:
        data = client.upload(*rows, names=names, dtype="float64")
        return client.propose(data, skeletons, **{"restarts": 0} | options)


class Failing(warpfit.testing.InProcessServer):
    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def _optimize(self, message):
        self.fail(fit_from_bytes(message).problem.batch)
        return super()._optimize(message)


def test_answers_are_kept_when_the_time_is_over_or_the_server_is_lost(monkeypatch):
    monkeypatch.setattr(proposals, "_TOGETHER", 2)
    skeletons = ["p1*a +", "p1*a", "p1*b", "p1*a + p2", "p1*b + p2", "p1*nosuch"]
    late, gone = DeadlineExceededError("late", "TIMEOUT"), UnavailableError("gone", "UNAVAILABLE")
    # Each pair takes three fits: to fit, for evidence, and to be judged.
    for error, fits in (*((late, fits) for fits in range(5)), (gone, 0), (gone, 1)):
        left = [None] * fits

        def end(_, left=left, error=error):
            if not left:
                raise error
            left.pop()

        if not fits:
            with pytest.raises(type(error)):
                proposed(table(), skeletons, server=Failing(end))
            continue
        found = proposed(table(), skeletons, server=Failing(end))
        fitted = [answer.program is not None for answer in found]
        assert fitted == [False, True, True, fits == 4, fits == 4, False]
        reasons = [getattr(answer.error, "reason", None) for answer in found]
        own = error.reason if fits < 4 else None
        assert np.isfinite(found[1].loss)
        assert np.isfinite(found[1].held_out_loss) == (fits >= 3)
        unjudged = found[1] if fits < 3 else found[3]
        said = any("fitted, but not judged" in warning for warning in unjudged.warnings)
        assert said == (fits != 3)
        assert reasons == ["EXPECTED_OPERAND", None, None, own, own, "UNKNOWN_NAME"]


def die_of_sines(batch):
    if (batch.codes == OPERATORS["sin"].code).any():
        raise warpfit.FailedPreconditionError("it has crashed the engine before", "QUARANTINED")


def test_good_skeletons_are_fitted_beside_bad_ones():
    bad = {
        **{"p1*a +": "EXPECTED_OPERAND", "p1*nosuch + a": "UNKNOWN_NAME"},
        "+".join(f"p{i + 1}*a^{i}" for i in range(ROWS)): "TOO_MANY_PARAMETERS",
        **{"p100000*a": "TOO_MANY_PARAMETERS", "a+" * 6000 + "a": "TOO_MANY_TOKENS"},
        Program.apply("add", *[Program.variable(0)] * 6000): "TOO_MANY_TOKENS",
        **{"p1*a + exp(b)": "UNITS_DIFFER", None: "UNKNOWN_EXPRESSION_TYPE"},
        **{Program.variable(7): "VARIABLE_OUT_OF_RANGE", "p1*sin(p2*a)": "QUARANTINED"},
    }
    good = ["p1*exp(p2*a) + p3*b", "p1*k", "p1*sqrt(a - 10)", "a + b"]
    skeletons = [*good[:2], *bad, *good[2:]]
    told, server = [], Failing(die_of_sines)
    options = {"units": {"a": "m", "b": "m"}, "progress": lambda *done: told.append(done)}
    found = proposed(table(), skeletons, server=server, restarts=2, **options)
    assert len(found) == len(skeletons)
    for skeleton, answer in zip(skeletons, found, strict=True):
        assert getattr(answer.error, "reason", None) == bad.get(skeleton)
        assert (answer.program is None) == (skeleton in bad)
    law, constant, root = found[0], found[1], found[-2]
    assert law.converged and law.held_out_loss < 4e-4 and law.r2 > 0.999 < law.held_out_r2
    assert np.allclose(law.parameters, (2.0, 0.5, 1.0), rtol=0.05)
    assert warpfit.parse(law.simplified, NAMES).parameters == 0
    assert np.abs(np.subtract(law.parameters, (2.0, 0.5, 1.0))).max() < 4 * max(law.standard_errors)
    assert law.description_length < constant.description_length
    assert [warpfit.parse(term.text, NAMES).variables for term in law.terms] == [1, 2]
    assert all(term.contribution > 0.9 for term in law.terms)
    assert any("k is constant" in warning for warning in constant.warnings)
    assert math.isnan(root.loss)
    assert any("NaN or infinite" in warning for warning in root.warnings)
    assert found.best is law and told == sorted(told)
    assert told[-1] == (len(skeletons), len(skeletons))
    assert json.loads(json.dumps([answer.as_dict() for answer in found], allow_nan=False))
    assert "p1*a +" in str(found)


def test_what_was_tried_is_known_by_its_form():
    with warpfit.testing.client() as client:
        data = client.upload(*table(), names=NAMES, dtype="float64")
        first = client.propose(data, ["p1*a + p2", "p2 + a*p1", "p1*a + p1"], restarts=0)
        again = client.propose(data, "p2*a + p1", restarts=0)
        other = client.upload(*table(1), names=NAMES)
        with pytest.raises(ZeroDivisionError):  # nothing was fitted
            client.propose(other, "p2*a + p1", restarts=0, progress=lambda *_: 1 / 0)
        other = client.propose(other, "p2*a + p1", restarts=0)
    assert [answer.tried for answer in [*first, *again, *other]] == [0, 1, 0, 2, 0]


@pytest.mark.parametrize("value", [math.nan, 1e200, "weights"])
def test_a_target_that_cannot_be_fitted_is_an_answer(value):
    # Names come in any sequence, as from a table.
    (X, y), skeletons = table(), np.array(["p1*a + p2", "p1 +"])
    fitted, late = y.copy(), y.copy()
    none, few = None, None
    if value == "weights":
        none, few = np.zeros(ROWS), np.r_[np.ones(40), np.zeros(20)]
    else:
        fitted[3] = late[-3] = value
    found = proposed((X, fitted, none), skeletons)
    assert [answer.error.reason for answer in found] == ["NOT_FINITE", "EXPECTED_OPERAND"]
    assert "no row has a weight" in str(found[0].error)
    found = proposed((X, late, few), skeletons)
    assert found[0].error is None and found.best is found[0]
    assert ["judge nothing" in warning for warning in found[0].warnings] == [True]


def test_rows_without_a_value_are_left_out_of_all_judgement():
    X, y = table()
    X[::7, 1] = -1.0
    X[-3:, 1] = -1.0
    skeletons = ["p1*log(b) + p2*a", "p1*sqrt(-a)", "p1*a"]
    law, nothing, line = proposed((X, y), skeletons, missing="drop")
    refused, gone = proposed((X, y), skeletons), int((X[:, 1] < 0.0).sum())
    assert law.warnings[0].startswith(f"{gone} of {ROWS} rows are left out")
    assert nothing.warnings[0].startswith(f"{ROWS} of {ROWS} rows are left out")
    assert math.isfinite(law.held_out_loss)
    # Without any row there is no loss: the penalty would be that of a constant.
    assert nothing.warnings[1].startswith("the formula is NaN or infinite in all rows")
    assert np.isnan([nothing.loss, nothing.held_out_loss, nothing.r2, nothing.bic]).all()
    assert not line.warnings
    # What has no value in the rows held out, or that are fitted, is not judged by others.
    assert refused.best is refused[2]
    X[:, 1] = np.r_[np.full(48, -1.0), np.exp(y[48:])]
    found = proposed((X, y), ["log(b)", "p1*a"])
    assert found.best is found[1] and math.isnan(found[0].held_out_loss)


def test_what_is_warned_of_and_limited(monkeypatch):
    X, y = table()
    (found,) = proposed((X, y), "p1*b + p2", ("p1", "b", "k"))
    assert found.warnings[0].startswith("p1 is a variable here")
    (found,) = proposed((X, y * 1e-200), "p1*a + p2")
    assert found.reason == "not_finite" and "choose other units" in found.warnings[0]
    monkeypatch.setattr(proposals, "MOST_SKELETONS", 2)
    monkeypatch.setattr(proposals, "_TOGETHER", 1)
    found = proposed(table(), ["p1*a", "p1*b", "p1*k", "p1 +"], restarts=1, loss="r2")
    assert [bool(answer.error) for answer in found] == [False, False, True, True]
    assert found.best is found[int(found[1].held_out_loss > found[0].held_out_loss)]
