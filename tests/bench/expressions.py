"""Write the expressions that other packages are compared on to `tests/data/expressions.txt`.

    python tests/bench/run.py expressions                        # the file of the repository
    python tests/bench/run.py expressions --seed 7 --out FILE    # fresh ones

They are those of ``cpu/values``, one a line, whose parameters are constants here.
"""

from pathlib import Path

from harness import arguments

from support.random_programs import thesis_mix

FILE = Path(__file__).resolve().parents[1] / "data" / "expressions.txt"


def lines(seed: int = 1) -> list[str]:
    """Return expressions as text with all digits of their constants."""
    drawn = zip(*thesis_mix(seed), strict=True)
    return [str(program.bind(parameters)) for program, parameters in drawn]


def main() -> None:
    options = arguments(__doc__, FILE.stem, seed=1, out=FILE)
    options.out.write_text("\n".join(lines(options.seed)) + "\n")
