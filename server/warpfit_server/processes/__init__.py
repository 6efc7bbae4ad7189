"""The server's processes: the supervisor, the front ends, the watchdog and its probe."""
