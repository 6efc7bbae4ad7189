"""Programs in Python and NumPy: checks, text, reference evaluation, error bounds."""
