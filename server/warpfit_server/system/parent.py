"""The end of the process that has started this server, for which it runs."""

import os
import select
import stat


class Parent:
    """The process that this one must not outlive, by its process id; 0 for none.

    Two signs tell its end, because each misses a case. When it dies, however that comes, this
    process gets another parent. When it becomes another program, which keeps its process id, it
    closes the pipe that is this process's standard input; where that is no pipe, only the first
    sign counts. (The signal PR_SET_PDEATHSIG would come when the thread ends that has started this
    process, while the others of its process still use it.)
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._poll = None
        if process_id and stat.S_ISFIFO(os.fstat(0).st_mode):
            self._poll = select.poll()
            self._poll.register(0, 0)

    def is_gone(self) -> bool:
        """Return whether this process has to end."""
        if not self._process_id:
            return False
        if os.getppid() != self._process_id:
            return True
        events = self._poll.poll(0) if self._poll is not None else []
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in events)
