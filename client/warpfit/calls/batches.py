"""Batches from expressions and parameters as callers pass them."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from numpy.typing import ArrayLike

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.parameter_vectors import ParameterVectors
from warpfit.frontends import as_population
from warpfit.ir import Batch, Population, Program

#: One vector [n] or K vectors [K, n] for each expression; for a single expression its own alone.
Parameters: TypeAlias = Sequence[ArrayLike] | ArrayLike | None

#: Number of batches that a client keeps, and the most tokens of one of them (9 bytes a token).
_MOST_BATCHES: Final = 8
_MOST_TOKENS: Final = 1 << 17


class PopulationCache:
    """The last few lists of programs of a client as populations; threads may share it.

    A local search sends the same programs again and again, and joining their tokens takes longer
    than finding them here. The state is one tuple that is replaced as a whole: if two threads add
    a batch at the same time, one of the two may be lost, which does no harm.
    """

    def __init__(self) -> None:
        self._recent: tuple[tuple[list[Program], Population], ...] = ()

    def of(self, programs: list[Program]) -> Population:
        """Return a population of these programs, in a list that nobody changes any more."""
        for known, batch in self._recent:
            # The first and the last one tell most batches apart before equality looks at tokens.
            if (
                len(known) == len(programs)
                and known[0] is programs[0]
                and known[-1] is programs[-1]
                and known == programs
            ):
                return batch
        batch = Population.joining(programs)
        if len(batch.codes) <= _MOST_TOKENS:
            self._recent = ((programs, batch), *self._recent[: _MOST_BATCHES - 1])
        return batch


def build_batch(
    expressions: Any, parameters: Parameters, names: tuple[str, ...], cache: PopulationCache
) -> tuple[Batch, bool]:
    """Turn expressions and parameters, as `warpfit.Client.evaluate` takes them, into a batch.

    Also returned is whether answers have a leading axis for parameter vectors.
    """
    if isinstance(expressions, Batch):
        if parameters is not None:
            raise InvalidArgumentError(
                "a Batch contains its parameters",
                "BAD_PARAMETERS",
                "Leave parameters= out, or give a list of Programs",
                "parameters",
            )
        expressions.check_dtypes()
        expressions.check_shapes()
        return expressions, expressions.vectors > 1
    single = is_single(expressions)
    programs = [expressions] if single else expressions
    if isinstance(programs, Population):
        programs.check_dtypes()
    else:
        programs = list(programs)
        is_converted = set(map(type, programs)) == {Program}
        programs = cache.of(programs) if is_converted else as_population(programs, names)
    entries = _entries(parameters, single, len(programs))
    vectors = ParameterVectors.of(len(programs), entries)
    return Batch.joined(programs, vectors), vectors.leading_axis


def is_single(expressions: Any) -> bool:
    """Tell one expression from several; a DEAP tree is a subclass of list."""
    if isinstance(expressions, str) or not hasattr(expressions, "__iter__"):
        return True
    return isinstance(expressions, list) and type(expressions) is not list


def _entries(parameters: Parameters, single: bool, programs: int) -> Sequence[ArrayLike] | None:
    """Return one entry for each program; a single expression's vector may stand alone."""
    if parameters is None:
        return None
    entries: Any = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    is_one_vector = programs == 1 and all(
        not hasattr(entry, "__len__") or getattr(entry, "ndim", 1) == 0 for entry in entries
    )
    return [parameters] if single or is_one_vector else entries  # type: ignore[list-item]
