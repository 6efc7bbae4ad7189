"""The CUDA device: memory, streams, driver calls, modules, compilers and resident data."""
