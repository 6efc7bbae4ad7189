"""Compiled code on the host: how Numba's functions are compiled, cached on disk and called."""
