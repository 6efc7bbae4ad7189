"""Write the expressions that other packages are compared on to `tests/data/expressions.txt`.

    python tests/bench/run.py expressions                        # the file of the repository
    python tests/bench/run.py expressions --seed 7 --out FILE    # fresh ones

They are those of ``cpu/values``, one a line: random ones of 10 to 50 tokens over x1 to x10, whose
parameters are constants here, so that any program can read them.
"""

import argparse
from pathlib import Path

from support.random_programs import thesis_mix

FILE = Path(__file__).resolve().parents[1] / "data" / "expressions.txt"


def lines(seed: int = 1, count: int = 300) -> list[str]:
    """Return expressions as text with all digits of their constants."""
    drawn = zip(*thesis_mix(seed, count), strict=True)
    return [str(program.bind(parameters)) for program, parameters in drawn]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    options.out.write_text("\n".join(lines(options.seed, options.count)) + "\n")
    print(f"{options.count} expressions of seed {options.seed} are in {options.out}")


if __name__ == "__main__":
    main()
