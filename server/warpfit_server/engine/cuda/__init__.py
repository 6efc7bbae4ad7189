"""The CUDA engine: a bytecode interpreter and a transpiler behind one engine interface."""
