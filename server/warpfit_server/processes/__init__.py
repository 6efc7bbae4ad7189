"""The server's processes: supervisors of engine and front ends, front-end process, watchdog."""
