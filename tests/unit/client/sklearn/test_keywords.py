"""Keywords of other programs, given to estimators."""

import pytest
from sklearn.base import clone

import warpfit
from warpfit.sklearn import SymbolicClassifier, SymbolicRegressor, SymbolicTransformer
from warpfit.sklearn.keywords import OF_OTHER_ESTIMATORS, OF_OTHER_FITS

OWN = SymbolicRegressor().get_params()


@pytest.mark.parametrize("name", sorted(OF_OTHER_ESTIMATORS))
def test_a_keyword_of_another_program_is_answered_by_ours(name):
    with pytest.raises(warpfit.InvalidArgumentError, match=f"no keyword '{name}'") as caught:
        SymbolicRegressor(**{name: 3})
    words = caught.value.remedy.replace("=", " ").replace(",", " ").split()
    assert set(words) & OWN.keys()
    assert name not in OWN


@pytest.mark.parametrize("kind", [SymbolicClassifier, SymbolicTransformer])
@pytest.mark.parametrize("name", ["max_seconds", "operators", "niterations"])
def test_keywords_of_a_search_belong_into_it(kind, name):
    with pytest.raises(warpfit.InvalidArgumentError, match="search=SymbolicRegressor"):
        kind(**{name: 3})


@pytest.mark.parametrize("name", sorted(OF_OTHER_FITS))
def test_a_keyword_of_another_fit_is_answered_by_ours(name):
    with pytest.raises(warpfit.InvalidArgumentError, match=f"no keyword '{name}'"):
        SymbolicRegressor().fit([[1.0]], [1.0], **{name: None})


def test_a_slip_is_answered_by_the_nearest_keyword():
    with pytest.raises(warpfit.InvalidArgumentError, match="Did you mean max_seconds="):
        SymbolicRegressor(max_second=3)
    with pytest.raises(warpfit.InvalidArgumentError, match="Use search, random_state"):
        SymbolicClassifier(wild=3)


def test_scikit_learn_sees_the_settings():
    model = SymbolicRegressor(max_seconds=3.0)
    assert clone(model).max_seconds == 3.0
    assert set(SymbolicTransformer().get_params(deep=False)) == {
        *("search", "n_components", "random_state")
    }
