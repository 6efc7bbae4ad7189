"""The CUDA device: memory, streams, driver calls, compilers and resident data."""
