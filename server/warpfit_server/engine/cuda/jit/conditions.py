"""Conditions under which a basic block runs: disjunctions of conjunctions of predicates."""

from __future__ import annotations

from typing import Final

#: Terms of literals: the number of a predicate, and whether it holds.
Condition = frozenset[frozenset[tuple[int, bool]]]
ALWAYS: Final[Condition] = frozenset({frozenset()})


def both(condition: Condition, predicate: int, polarity: bool) -> Condition:
    """Conjunction with one more literal."""
    return frozenset(
        term | {(predicate, polarity)}
        for term in condition
        if (predicate, not polarity) not in term
    )


def either(first: Condition, second: Condition) -> Condition:
    """Disjunction, with ``x and p or x and not p`` simplified to ``x``."""
    terms = set(first | second)
    for term in list(terms):
        for predicate, polarity in term:
            twin = term - {(predicate, polarity)} | {(predicate, not polarity)}
            if term in terms and twin in terms:
                merged = frozenset({term - {(predicate, polarity)}})
                return either(frozenset(terms - {term, twin}), merged)
    return frozenset(term for term in terms if not any(other < term for other in terms))
