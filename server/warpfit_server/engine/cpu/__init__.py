"""The CPU engine: interpreters in compiled code, on threads that share chunks of work."""
