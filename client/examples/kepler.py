"""Rediscover Kepler's third law: genetic programming over structure, fitting on the server.

    python client/examples/kepler.py                      # starts a server by itself
    python client/examples/kepler.py --address HOST:PORT
    python client/examples/kepler.py --plot kepler.svg    # the picture of README.md

The data are the eight planets and Pluto from NASA's planetary fact sheet: distance from the Sun,
mass and eccentricity of each, and, to be explained, the period of its orbit. The search invents
formulas, and the server fits their numbers, a whole generation in one call. Formulas are compared
by the Bayesian information criterion (Schwarz 1978), which sets the error against the length, and
they are short, because nine planets would be fitted exactly by one that is long enough. The law is
found when ``p1 * distance^p2`` turns up; a last fit says that p2 is 1.5, and how sure that is.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

import warpfit
from warpfit.embedded import server_at
from warpfit.expressions.language import to_text
from warpfit.sklearn import SymbolicRegressor

NAMES = ("distance", "mass", "eccentricity")
#: 10^6 km, 10^24 kg, 1, and days (NASA Space Science Data Coordinated Archive, planetary fact
#: sheet, metric).
PLANETS = {
    "Mercury": (57.9, 0.330, 0.206, 88.0),
    "Venus": (108.2, 4.87, 0.007, 224.7),
    "Earth": (149.6, 5.97, 0.017, 365.2),
    "Mars": (228.0, 0.642, 0.094, 687.0),
    "Jupiter": (778.5, 1898.0, 0.049, 4331.0),
    "Saturn": (1432.0, 568.0, 0.052, 10747.0),
    "Uranus": (2867.0, 86.8, 0.047, 30589.0),
    "Neptune": (4515.0, 102.0, 0.010, 59800.0),
    "Pluto": (5906.4, 0.0130, 0.244, 90560.0),
}


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the planets and the law, such as x.svg"
    )
    options = parser.parse_args()
    if not options.address:
        print("starting a server")
    table = np.array(list(PLANETS.values()))
    X, period = table[:, :3], table[:, 3]
    weights = 1.0 / np.square(period)  # so that relative errors count
    started = time.perf_counter()
    with server_at(options.address, ["--devices", "cpu"]) as address:
        model = SymbolicRegressor(
            address=address,
            operators=("+", "-", "*", "/", "^", "sqrt", "square", "log", "exp"),
            generations=options.generations,
            held_out=0.0,
            max_size=9,
            random_state=options.seed,
        ).fit(X, period, weights)
        with warpfit.connect(address) as client:
            data = client.upload(X, period, weights, names=NAMES, dtype="float64")
            program, start = model.program_.lift_constants()
            fit = client.optimize(data, [program], [start], standard_errors=True)
    for equation in model.front_[:5]:
        print(f"loss {equation.loss:.2e}  period = {to_text(equation.program, NAMES)}")
    print(f"\n{time.perf_counter() - started:.1f} s; the law:")
    print(f"  period = {to_text(fit.formula(), NAMES)}")
    for name, value, error in zip(
        ("p1", "p2"), fit.parameters[0], fit.standard_errors[0], strict=True
    ):
        print(f"  {name} = {value:.5f} +- {error:.5f}")
    error = np.abs(model.predict(X) / period - 1.0).max()
    print(f"  largest relative error {100 * error:.2f} % over {len(PLANETS)} planets")
    if options.plot:
        four_digits = [float(f"{number:.4g}") for number in fit.parameters[0]]
        draw(options.plot, program.bind(four_digits))


def draw(path: str, law: warpfit.Program) -> None:
    """Draw the planets and the law."""
    import matplotlib
    from matplotlib.figure import Figure

    table = np.array(list(PLANETS.values()))
    line = np.geomspace(40.0, 9000.0, 50)
    values = law.to_numpy()(np.column_stack([line, line, line]))
    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.subplots()
    axes.loglog(line, values, color="#2b6cb0", label="the formula that was found")
    axes.loglog(table[:, 0], table[:, 3], "o", color="#dd6b20", label="eight planets and Pluto")
    for name, (distance, _, _, period) in PLANETS.items():
        axes.annotate(name, (distance, period), (7, -9), textcoords="offset points", fontsize=8)
    axes.set(xlabel="distance from the Sun, million km", ylabel="period, days")
    text = f"period = ${law.latex(NAMES)}$"
    axes.text(0.04, 0.62, text, transform=axes.transAxes, fontsize=14, color="#2b6cb0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.tight_layout()
    # Without a date and random names a second run writes the same file.
    with matplotlib.rc_context({"svg.hashsalt": "warpfit", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    main()
