"""Code generation for the CPU: kernels and elementary functions, compiled by LLVM."""
