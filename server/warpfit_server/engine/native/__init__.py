"""Native code on the host: how Numba's functions are compiled, kept on disk and called."""
