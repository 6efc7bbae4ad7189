"""A request whose programs are divided among several engines.

All parts lie in one segment, where each engine writes into its slice of the results, so that the
answer is together once all of them are done.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final

from warpfit.errors import WarpfitError
from warpfit.fitting import FitProgress
from warpfit.request import Timings
from warpfit_server.ipc import messages
from warpfit_server.ipc.in_flight_request import InFlightRequest

#: Least seconds between two reports of the progress of a fit.
_PROGRESS_SECONDS: Final = 0.1


class SplitRequest:
    """Requests for parts of a batch, used like one `InFlightRequest` for all of it.

    The parts are waited for in their order; the replies of later ones wait in the meantime.

    The whole request has the segment, and is not sent.
    """

    def __init__(self, whole: InFlightRequest, parts: Sequence[InFlightRequest]) -> None:
        self.segment = whole.segment
        self.segment_layout = whole.segment_layout
        self.timings: Timings | None = None
        """The longest time of each stage among the parts, once all have finished."""
        self.device = ",".join(dict.fromkeys(part.device for part in parts))
        """Labels of the devices."""
        self._parts = parts
        self._finished = 0
        self._programs = 0  # in the parts that have finished
        self._reported = time.monotonic()

    def shares(self) -> Iterator[tuple[float, Timings]]:
        """Yield the share of the tokens and the timings of each part that has finished."""
        for part in self._parts:
            if part.timings is not None:
                share = part.segment_layout.tokens / max(1, self.segment_layout.tokens)
                yield share, part.timings

    def next_reply(self) -> messages.Reply:
        """Wait for the engines; see `InFlightRequest.next_reply`.

        An error names the index of a program in the whole batch.
        """
        while True:
            part = self._parts[self._finished]
            try:
                reply = part.next_reply()
            except WarpfitError as error:
                if error.expression is not None:
                    error.expression += self._programs
                raise
            if isinstance(reply, messages.ValuesReady):
                return messages.ValuesReady(reply.request, self._programs + reply.programs)
            if isinstance(reply, messages.RequestFinished):
                self._finished += 1
                self._programs += part.segment_layout.programs
                if self._finished == len(self._parts):
                    self.timings = _longest([timings for _, timings in self.shares()])
                    return reply
                return messages.ValuesReady(reply.request, self._programs)
            if time.monotonic() - self._reported >= _PROGRESS_SECONDS:
                self._reported = time.monotonic()
                return messages.FitProgressed(reply.request, self._progress())

    def _progress(self) -> FitProgress:
        """Return the progress of all parts of a fit."""
        iterations = active = searches = 0
        for number, part in enumerate(self._parts):
            if part.replies is not None:
                part.replies.receive_now()
            layout, progress = part.segment_layout, part.progress
            own = layout.programs * layout.vectors
            searches += own
            if number >= self._finished:
                active += own if progress is None else progress.active
                iterations = max(iterations, 0 if progress is None else progress.iterations)
        return FitProgress(iterations, active, searches)

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        for part in self._parts:
            part.cancel()

    def close(self) -> None:
        """Wait until all engines are done, then give the segment back."""
        end_parts(self._parts)


def end_parts(parts: Sequence[InFlightRequest]) -> None:
    """Cancel parts that have not finished, wait for them, and give their segment back."""
    for part in parts:
        if part.timings is None:
            part.cancel()
    are_clean = [part.end() for part in parts]
    parts[0].connection.pool.release(parts[0].segment, is_clean=all(are_clean))


def _longest(timings: Sequence[Timings]) -> Timings:
    """Return the longest time of each stage."""
    stages = ("decode", "queue", "copy_in", "compute", "copy_out")
    longest = {stage: max(getattr(each, stage) for each in timings) for stage in stages}
    hits = sum(each.cache_hits for each in timings)
    return Timings(**longest, tier=timings[0].tier, cache_hits=hits)
