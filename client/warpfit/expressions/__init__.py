"""What is done with programs in Python: checks, text, NumPy reference, error bounds."""
