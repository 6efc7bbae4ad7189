"""Expressions beside their representation: text, derivatives, error bounds, the NumPy reference."""
