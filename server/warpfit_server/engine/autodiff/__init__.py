"""Differentiation of programs as they are lowered, for both engines."""
