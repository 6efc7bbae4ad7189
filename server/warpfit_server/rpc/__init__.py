"""The gRPC edge: port, interceptor, servicer, errors as statuses, health, TLS."""
