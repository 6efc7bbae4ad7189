"""``warpfit bench``: measure this machine's engines and their peers, report, and load a server."""
