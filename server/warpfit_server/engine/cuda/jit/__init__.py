"""Compiled kernels: expressions translated to PTX, fused into kernels, launched as CUDA graphs."""
