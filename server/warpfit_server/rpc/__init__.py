"""The gRPC edge: port, calls, servicers, errors as statuses, health, TLS."""
