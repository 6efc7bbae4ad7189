"""``warpfit bench``: measures this machine's engines and other libraries, and loads a server."""
