"""Programs: one expression as tokens, its checks, its text, its values in NumPy."""
