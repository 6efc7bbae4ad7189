"""warpfit: expression evaluation for symbolic regression, on a GPU, through the network.

::

    import warpfit

    with warpfit.connect("127.0.0.1:50551") as client:
        data = client.upload(X, y)
        values = client.evaluate(data, ["x1 + p1*x2"], [[0.5]])
        losses = client.evaluate(data, ["x1 + p1*x2"], [[0.5]], loss="mse")
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from warpfit.dataset import PrecisionWarning
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ParseError,
    PermissionDeniedError,
    ProgramError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    WarpfitError,
    attribute_error,
    did_you_mean,
)
from warpfit.ir import Batch, Population, Program
from warpfit.losses import Closing, Loss, LossFunction

# Bound now, because importing the module `warpfit.parse` later would shadow the function.
from warpfit.parse import define, parse
from warpfit.request import Accuracy, Method, Precision, Reason, Tier
from warpfit.transport.connection import RetryPolicy, TransportConfig, configure_grpc

configure_grpc()

if TYPE_CHECKING:
    from warpfit.aio import AsyncClient, connect_async
    from warpfit.client import Client, connect, local, simplify
    from warpfit.transport.connection import TlsConfig

    __version__: str

_LAZY: Final = {
    "warpfit.aio": ("AsyncClient", "connect_async"),
    "warpfit.client": ("Client", "connect", "local", "simplify"),
    "warpfit.transport.connection": ("TlsConfig",),
}

#: Classes that are meant by these names, which need scikit-learn.
_ESTIMATORS: Final = (
    *("ParameterOptimizer", "SymbolicClassifier", "SymbolicRegressor", "SymbolicTransformer"),
)

#: Methods of clients by their names and by those of other packages.
_METHODS: Final = {
    **{name: name for name in ("evaluate", "optimize", "propose", "search", "upload")},
    **dict.fromkeys(("fit", "curve_fit", "minimize", "least_squares"), "optimize"),
}

__all__ = ["Accuracy", "AsyncClient", "Batch", "CancelledError", "Client", "Closing"]
__all__ += ["DatasetNotFoundError", "DeadlineExceededError", "FailedPreconditionError"]
__all__ += ["InternalError", "InvalidArgumentError", "Loss", "LossFunction", "Method", "ParseError"]
__all__ += ["PermissionDeniedError", "Population", "Precision", "PrecisionWarning", "Program"]
__all__ += ["ProgramError", "Reason", "ResourceExhaustedError", "RetryPolicy", "Tier", "TlsConfig"]
__all__ += ["TransportConfig", "UnauthenticatedError", "UnavailableError", "UnimplementedError"]
__all__ += ["WarpfitError", "__version__", "connect", "connect_async", "define", "local", "parse"]
__all__ += ["simplify"]


def __dir__() -> list[str]:
    """Return the public names, those that are imported on first use among them."""
    return [*__all__, "testing"]


def __getattr__(name: str) -> Any:
    """Import modules that need gRPC on first use; gRPC doubles the time of ``import warpfit``."""
    if name == "__version__":
        # Loading the module itself takes a fifth of the time of ``import warpfit``.
        return import_module("importlib.metadata").version("warpfit")
    if name == "testing":
        return import_module("warpfit.testing")
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(module), name)
    message = f"module 'warpfit' has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(message)
    if name in _ESTIMATORS:
        remedy = f"Write: from warpfit.sklearn import {name}"
    elif find_spec(f"warpfit.{name}") is not None:
        remedy = f"Write: import warpfit.{name}"
    elif name in _METHODS:
        remedy = f"Use {_METHODS[name]} of a client: warpfit.connect(), or warpfit.local()"
    else:
        remedy = did_you_mean(name, __dir__(), "")
    raise attribute_error(message, remedy)
