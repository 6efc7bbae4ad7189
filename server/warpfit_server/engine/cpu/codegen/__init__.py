"""The CPU engine's vector code: kernels and functions, made by LLVM for this very processor."""
