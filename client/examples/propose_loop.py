"""A loop that proposes skeletons and learns from the answers, without any language model.

    python client/examples/propose_loop.py                      # starts a server by itself
    python client/examples/propose_loop.py --address HOST:PORT

A random grammar stands where a model would: it writes skeletons, formulas whose constants are
p1, p2, .... `client.propose` fits all of a round together, from several starts each, and answers
every skeleton: an error with its place, or the formula with its loss on rows held out, evidence and
warnings. The loop keeps the best, and half of the next round are changes of these. To let a model
propose, replace `Grammar.propose`: what it needs to know is in the answers.

The data are a damped oscillation with noise of 1% of its amplitude:
y = 3 exp(-0.4 t) cos(2.5 t) + 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re

import numpy as np

import warpfit
from warpfit.calls.proposals import Proposal
from warpfit.embedded import server_at
from warpfit.expressions.language import to_text

FUNCTIONS = ("exp({})", "sin({})", "cos({})", "sqrt(abs({}))", "({})^2", "1/(1 + {})")


class Grammar:
    """Proposes random skeletons, and changes of those that were good."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        self.names, self.random = names, random.Random(seed)

    def propose(self, count: int, best: list[Proposal]) -> list[str]:
        """Return skeletons: half of them new, half of them changes of the best ones."""
        fresh = [self.total() for _ in range(count if not best else count // 2)]
        changed = [
            self.change(self.random.choice(best).skeleton) for _ in range(count - len(fresh))
        ]
        return [numbered(text) for text in [*fresh, *changed]]

    def total(self) -> str:
        """Return a sum of products."""
        terms = [self.product() for _ in range(self.random.randint(1, 2))]
        return " + ".join([*terms, "p"])

    def product(self) -> str:
        """Return a parameter times functions."""
        factors = [self.factor() for _ in range(self.random.randint(1, 2))]
        return "*".join(["p", *factors])

    def factor(self) -> str:
        """Return a variable, or a function of one."""
        name = self.random.choice(self.names)
        if self.random.random() < 0.2:
            return name
        return self.random.choice(FUNCTIONS).format(f"p*{name}")

    def change(self, skeleton: str) -> str:
        """Return a skeleton with a factor or a term more, or with another function."""
        kind = self.random.randrange(3)
        if kind == 0:
            return f"{skeleton} + {self.product()}"
        if kind == 1:
            terms = skeleton.split(" + ")
            place = self.random.randrange(len(terms))
            terms[place] += f"*{self.factor()}"
            return " + ".join(terms)
        old = self.random.choice(["exp", "sin", "cos"])
        return skeleton.replace(old, self.random.choice(["exp", "sin", "cos"]), 1)


def numbered(skeleton: str) -> str:
    """Number the parameters of a skeleton: p1, p2, ...."""
    parts = re.split(r"\bp\d*\b", skeleton)
    return "".join(part + f"p{i}" for i, part in enumerate(parts[:-1], 1)) + parts[-1]


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described = "HOST:PORT of a server (default: WARPFIT_ADDRESS, or start one)"
    parser.add_argument("--address", default=os.environ.get("WARPFIT_ADDRESS"), help=described)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--skeletons", type=int, default=100, help="in each round")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    t = rng.uniform(0.0, 6.0, 300)
    y = 3.0 * np.exp(-0.4 * t) * np.cos(2.5 * t) + 1.0 + rng.normal(0.0, 0.03, 300)
    grammar, best = Grammar(("t",), options.seed), list[Proposal]()
    with (
        server_at(options.address, ["--devices", "cpu"]) as address,
        warpfit.connect(address) as client,
    ):
        data = client.upload(t[:, None], y, names=("t",), dtype="float64")
        for round_ in range(1, options.rounds + 1):
            answers = client.propose(data, grammar.propose(options.skeletons, best))
            useful = [each for each in answers if each.error is None and each.held_out_r2 > 0.0]
            # A skeleton that was tried before has nothing new to say.
            best += [each for each in useful if not each.tried]
            # A longer formula has to fit better: its description length says whether it does.
            best = sorted(best, key=lambda each: each.description_length)[:10]
            wrong = sum(each.error is not None for each in answers)
            count = f"{len(useful)} of {len(answers)}"
            print(f"round {round_}: {count} predict better than the mean, {wrong} refused")
            if best:
                print(f"  held-out R2 {best[0].held_out_r2:.4f}  {best[0].skeleton}")
        if not best:
            raise SystemExit("no formula predicts better than the mean: give more --skeletons")
        law = best[0]
        short = client.simplify(data, [law.expression], tolerance=0.05).programs[0]
    print(f"y = {to_text(short, ('t',))}")
    print(f"  R2 on the rows held out {law.held_out_r2:.4f}")
    for remark in law.warnings:
        print(f"  {remark}")


if __name__ == "__main__":
    main()
