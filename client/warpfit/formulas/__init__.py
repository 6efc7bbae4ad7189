"""Formulas for publication: simplification, snapped constants, code in other languages."""
