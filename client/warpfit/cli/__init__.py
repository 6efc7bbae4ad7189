"""The command ``warpfit``."""
