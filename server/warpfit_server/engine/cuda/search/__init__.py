"""Searches on a GPU: the colony, and pairs of short formulas."""
