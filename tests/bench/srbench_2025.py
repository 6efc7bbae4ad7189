"""SRBench's protocol of 2025 on those of its data sets that are there, by the method's own hooks.

    python tests/bench/run.py srbench_2025 --data FOLDER --seconds 5 --seeds 5

FOLDER holds files ``NAME.tsv.gz`` as PMLB's, with a column ``target``. Each run takes 75% of the
rows for training, standardises features and target, and fits `client/examples/srbench/regressor.py`
as the harness does; R2 is that of the other rows, and the size counts the nodes of the formula's
SymPy expression, without a simplification (Imai Aldeia et al., "Call for Action: towards the next
generation of symbolic regression benchmark", GECCO Companion 2025). Published runs have an hour on
one core and the best of up to 30 settings; these have ``--seconds`` and the default settings, which
the result file says.
"""

import gzip
import io
import itertools
import os
import re
import runpy
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import ServerProcess, arguments, save

ROOT: Final = Path(__file__).resolve().parents[2]
METHOD: Final = ROOT / "client" / "examples" / "srbench" / "regressor.py"
#: R2 and size of the formula that table 3 of the paper prints for a data set: of all fronts the one
#: that is nearest to the governing model.
_PUBLISHED: Final = """
    first_principles_absorption ITEA 1.00 6; first_principles_bode Rils-Rols 1.00 8
    first_principles_hubble gplearn 0.86 3; first_principles_ideal_gas Rils-Rols 0.99 14
    first_principles_kepler QLattice 1.00 10; first_principles_leavitt ITEA 0.97 3
    first_principles_newton Rils-Rols 0.90 16; first_principles_planck PySR 1.00 24
    first_principles_rydberg Operon 1.00 21; first_principles_schechter Operon 1.00 13
    first_principles_supernovae_zr PySR 1.00 29; first_principles_tully_fisher ITEA 0.93 3
"""
PUBLISHED: Final = {
    name: (method, float(r2), int(nodes))
    for name, method, r2, nodes in map(str.split, re.split("[;\n]", _PUBLISHED.strip()))
}
#: Data sets of the black-box track, for which the paper prints no numbers.
BLACK_BOX: Final = (
    *("1028_SWD", "1089_USCrime", "1193_BNG_lowbwt", "1199_BNG_echoMonths", "192_vineyard"),
    *("210_cloud", "522_pm10", "557_analcatdata_apnea1", "579_fri_c0_250_5", "606_fri_c2_1000_10"),
    *("650_fri_c0_500_50", "678_visualizing_environmental"),
)


def read(path: Path) -> tuple[Any, Any]:
    lines = gzip.decompress(path.read_bytes()).decode()
    table = np.loadtxt(io.StringIO(lines), delimiter="\t", skiprows=1)
    place = lines.splitlines()[0].split("\t").index("target")
    return np.delete(table, place, axis=1), table[:, place]


def one_run(method: dict[str, Any], path: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Fit and judge one split, as the harness does."""
    import sympy
    from sklearn.base import clone
    from sklearn.metrics import r2_score
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    parts = train_test_split(*read(path), train_size=0.75, test_size=0.25, random_state=seed)
    X, left_out, y, y_left_out = parts
    columns, target = StandardScaler().fit(X), StandardScaler().fit(y[:, None])
    est = clone(method["est"]).set_params(max_time=seconds, random_state=seed)
    begun = time.perf_counter()
    est.fit(columns.transform(X), target.transform(y[:, None])[:, 0])
    taken = time.perf_counter() - begun
    predicted = target.inverse_transform(est.predict(columns.transform(left_out))[:, None])
    text = method["model"](est)
    size = sum(1 for _ in sympy.preorder_traversal(sympy.parse_expr(text)))
    return {
        **{"data": path.name.removesuffix(".tsv.gz"), "seed": seed, "rows": len(X) + len(left_out)},
        **{"r2_test": float(r2_score(y_left_out, predicted)), "size": size, "seconds": taken},
        "formula": text,
    }


def main() -> None:
    options = arguments(__doc__, "srbench_2025", data=Path(), seconds=5.0, seeds=5)
    known = [*PUBLISHED, *BLACK_BOX]
    files = {name: options.data / f"{name}.tsv.gz" for name in known}
    there = {name: path for name, path in files.items() if path.exists()}
    runs: list[dict[str, Any]] = []
    with ServerProcess("--threads", "1") as server:
        os.environ["WARPFIT_ADDRESS"] = server.address
        method = runpy.run_path(str(METHOD))
        for path, seed in itertools.product(there.values(), range(1, options.seeds + 1)):
            runs.append(one_run(method, path, seed, options.seconds))
    content = {
        **{"seconds": options.seconds, "seeds": options.seeds, "threads": 1},
        "not_there": [name for name in known if name not in there],
        "published": {name: PUBLISHED[name] for name in there if name in PUBLISHED},
        "published_source": "doi 10.1145/3712255.3734309, table 3; arXiv 2505.03977",
        "runs": runs,
    }
    save(options.name, content, options.folder, show=False)
