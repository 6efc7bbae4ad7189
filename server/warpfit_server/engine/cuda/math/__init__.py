"""CUDA C++ of elementary functions, and what every generated kernel starts from."""
