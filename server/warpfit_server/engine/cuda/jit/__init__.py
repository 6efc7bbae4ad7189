"""Compiled kernels: expressions as PTX, fused into groups, launched as CUDA graphs."""
