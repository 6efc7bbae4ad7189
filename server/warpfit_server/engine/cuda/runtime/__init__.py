"""The CUDA device: memory, streams, modules, compilers and resident data."""
