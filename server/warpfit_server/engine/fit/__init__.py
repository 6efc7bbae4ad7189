"""Fitting parameters: searches that advance together, one engine pass for a step of all of them."""
