"""The CPU engine: a vector interpreter in native code, a parallel loop over pieces."""
