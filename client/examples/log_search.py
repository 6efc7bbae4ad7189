"""Log a search while it runs: to TensorBoard, or to anything that is called with numbers.

    python client/examples/log_search.py                        # prints the numbers
    python client/examples/log_search.py --tensorboard runs     # pip install tensorboardX
    python client/examples/log_search.py --address HOST:PORT

`SearchLogger` calls a function with a name, a number and the number of generations. This is what
``SummaryWriter.add_scalar`` of TensorBoard takes; for others a line is enough::

    SearchLogger(lambda name, value, step: wandb.log({name: value}, step=step))
    SearchLogger(lambda name, value, step: mlflow.log_metric(name, value, step=step))
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from warpfit.sklearn import Equation, SymbolicRegressor


class SearchLogger:
    """The ``callback`` of a `SymbolicRegressor` that logs the best formulas so far.

    Args:
        log: called with a name, a number, and the number of generations.
        text: called with a name, the best formula, and the number of generations, if it is given.
    """

    def __init__(
        self,
        log: Callable[[str, float, int], object],
        text: Callable[[str, str, int], object] | None = None,
    ) -> None:
        self.log, self.text = log, text

    def __call__(
        self, model: SymbolicRegressor, generation: int, front: Sequence[Equation]
    ) -> None:
        """Log the least loss, its size, and how many sizes have a formula of their own."""
        best = min(front, key=lambda equation: equation.loss)
        self.log("search/loss", best.loss, generation)
        self.log("search/size", best.complexity, generation)
        self.log("search/formulas", len(front), generation)
        if self.text is not None:
            self.text("search/best", best.equation, generation)


def main() -> None:
    """Search for a law, and log it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write events for TensorBoard")
    parser.add_argument("--generations", type=int, default=20)
    options = parser.parse_args()
    X = np.random.default_rng(0).uniform(1.0, 4.0, (300, 3))
    y = X[:, 0] * np.exp(-X[:, 1]) + 0.5 * np.sqrt(X[:, 2])
    with ExitStack() as stack:
        if options.tensorboard:
            events: Any
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                from tensorboardX import SummaryWriter
            events = stack.enter_context(SummaryWriter(options.tensorboard))
            logger = SearchLogger(events.add_scalar, events.add_text)
        else:
            logger = SearchLogger(
                lambda name, value, step: print(f"generation {step}: {name} {value:.4g}")
            )
        model = SymbolicRegressor(
            address=options.address,
            generations=options.generations,
            callback=logger,
            random_state=0,
        )
        model.fit(X, y)
    print(f"y = {model.expression_}")


if __name__ == "__main__":
    main()
