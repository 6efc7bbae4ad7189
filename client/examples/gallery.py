"""Three studies of public tables: a regression of NIST, an enzyme with bands, and two groups.

    python client/examples/gallery.py                      # starts a server by itself
    python client/examples/gallery.py --address HOST:PORT
    python client/examples/gallery.py --plots FOLDER       # the pictures of the gallery

The tables are Misra1a of NIST's nonlinear regressions (public domain), and the reaction rates of an
enzyme with and without puromycin (Treloar 1974, in Bates and Watts, "Nonlinear Regression Analysis
and Its Applications", 1988, table A1.3).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

import warpfit
from warpfit.embedded import server_at
from warpfit.sklearn import SymbolicRegressor

#: Volume and pressure of adsorption.
MISRA = np.array(
    [
        *((77.6, 10.07), (114.9, 14.73), (141.1, 17.94), (190.8, 23.93), (239.9, 29.61)),
        *((289.0, 35.18), (332.8, 40.02), (378.4, 44.82), (434.8, 50.76), (477.3, 55.05)),
        *((536.8, 61.01), (593.1, 66.40), (689.1, 75.47), (760.0, 81.78)),
    ]
)
#: What NIST certifies.
CERTIFIED = (2.3894212918e2, 5.5015643181e-4)
#: Concentration in parts per million, and counts a minute squared, with and without puromycin.
CONCENTRATIONS = np.repeat([0.02, 0.06, 0.11, 0.22, 0.56, 1.10], 2)
TREATED = np.array([76, 47, 97, 107, 123, 139, 159, 152, 191, 201, 207, 200.0])
UNTREATED = np.array([67, 51, 84, 86, 98, 115, 131, 124, 144, 158, 160.0])
RIVALS = ("p1*x/(p2 + x)", "p1*(1 - exp(-p2*x))", "p1 + p2*log(x)", "p1*x^p2")


def nist(client: warpfit.Client, folder: Path | None) -> None:
    """Fit Misra1a from NIST's far start, and compare with what is certified."""
    data = client.upload(MISRA[:, 0], MISRA[:, 1], names=["x"], dtype="float64")
    fit = client.optimize(
        data, ["p1*(1 - exp(-p2*x))"], [[500.0, 1e-4]], accuracy="final", covariance=True
    )
    digits = -np.log10(np.abs(fit.parameters[0] / CERTIFIED - 1.0)).min()
    print(f"NIST Misra1a: {fit.texts[0]}, {digits:.1f} certified digits")
    draw(folder, "nist", "volume", "pressure", fit, [("Misra1a", *MISRA.T)], 0)


def enzyme(client: warpfit.Client, folder: Path | None) -> None:
    """Weigh four laws of an enzyme against one another, and draw Michaelis's with its band."""
    data = client.upload(CONCENTRATIONS, TREATED, names=["x"], dtype="float64")
    starts = [[200.0, 0.1], [200.0, 5.0], [200.0, 30.0], [200.0, 0.3]]
    fit = client.optimize(
        data, list(RIVALS), starts, accuracy="final", covariance=True, evidence=True
    )
    assert fit.evidence is not None
    factors = fit.evidence.bayes_factor
    for rival, factor in zip(RIVALS, factors, strict=True):
        print(f"enzyme: {rival:22} {factor:8.2f} nats of evidence")
    draw(folder, "enzyme", "concentration, ppm", "rate", fit,
         [("with puromycin", CONCENTRATIONS, TREATED)], 0)  # fmt: skip


def groups(address: str, folder: Path | None) -> None:
    """Find one law for both treatments, with constants of their own."""
    concentrations = np.append(CONCENTRATIONS, CONCENTRATIONS[:-1])
    rates = np.append(TREATED, UNTREATED)
    treated = np.repeat([1.0, 0.0], [12, 11])
    model = SymbolicRegressor(
        address=address, operators=["+", "*", "/"], group=1, max_size=9, population=100,
        generations=3, model_selection="description_length", held_out=0.0, random_state=0,
    )  # fmt: skip
    model.fit(np.column_stack([concentrations, treated]), rates)
    print(f"groups: rate = {model.expression_}")
    print(model.constants_)
    if folder is not None:
        line = np.linspace(0.0, 1.2, 200)
        figure, axes = canvas("concentration, ppm", "rate")
        for group, name in ((1.0, "with puromycin"), (0.0, "without")):
            (drawn,) = axes.plot(
                concentrations[treated == group], rates[treated == group], "o", label=name
            )
            columns = np.column_stack([line, np.full(200, group)])
            axes.plot(line, model.predict(columns), color=drawn.get_color())
        save(figure, axes, folder / "gallery_groups.svg")


def draw(
    folder: Path | None, name: str, x: str, y: str, fit: Any, points: list[Any], place: int
) -> None:
    """Draw points, a fitted formula, and its confidence band."""
    if folder is None:
        return
    figure, axes = canvas(x, y)
    ((label, at, values),) = points
    axes.plot(at, values, "o", color="#dd6b20", label=label)
    line = np.linspace(0.0 if at.min() < 1.0 else at.min(), at.max(), 200)[1:]
    band = fit.band(line, place)
    axes.plot(line, band.values, color="#2b6cb0", label=fit.texts[place])
    axes.fill_between(line, band.low, band.high, color="#2b6cb0", alpha=0.2)
    save(figure, axes, folder / f"gallery_{name}.svg")


def canvas(x: str, y: str) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, axes: Any, path: Path) -> None:
    """Write a figure, the same bytes each time."""
    import matplotlib

    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "warpfit", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the three studies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a picture of each")
    options = parser.parse_args()
    with server_at(options.address, ["--devices", "cpu"]) as address:
        with warpfit.connect(address) as client:
            nist(client, options.plots)
            enzyme(client, options.plots)
        groups(address, options.plots)


if __name__ == "__main__":
    main()
