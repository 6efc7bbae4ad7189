"""scikit-learn estimators that search and fit formulas with a warpfit server.

::

    from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor

    model = SymbolicRegressor(random_state=0).fit(X, y)     # finds a formula
    model.expression_, model.predict(X), model.equations_, model.plot_front()

    law = ParameterOptimizer("p1*exp(p2*x1)").fit(X, y)     # fits the numbers of a known one
    law.parameters_, law.standard_errors_

    SymbolicClassifier().fit(X, classes)                    # a formula for the odds of two classes
    SymbolicTransformer().fit_transform(X, y)               # the best formulas as features

All start a server on this machine for each ``fit`` unless they are given the address of one or a
client, as that of `warpfit.local`, which serves many fits; ``predict`` needs none. They need
scikit-learn, ``pip install 'warpfit[sklearn]'``, and without an address the server,
``pip install 'warpfit[sklearn,server]'``.
"""

from __future__ import annotations

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    error.add_note("Install it: pip install 'warpfit[sklearn]'")
    raise

from warpfit.sklearn.derived import SymbolicClassifier, SymbolicTransformer
from warpfit.sklearn.equations import Equation
from warpfit.sklearn.estimator import ParameterOptimizer, SearchWarning
from warpfit.sklearn.regressor import SymbolicRegressor

__all__ = [
    "Equation",
    "ParameterOptimizer",
    "SearchWarning",
    "SymbolicClassifier",
    "SymbolicRegressor",
    "SymbolicTransformer",
]
