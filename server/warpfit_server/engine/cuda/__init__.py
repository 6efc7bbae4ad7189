"""The CUDA engine: interpreters, also of derivatives, and compiled kernels behind one interface."""
