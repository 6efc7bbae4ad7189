"""The CUDA device: memory, streams, command lists, modules, compilers and resident data."""
