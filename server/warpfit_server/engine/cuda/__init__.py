"""The CUDA engine: interpreters, also of derivatives, and a transpiler behind one interface."""
