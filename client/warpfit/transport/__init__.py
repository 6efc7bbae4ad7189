"""The gRPC channel of a client: address, settings, credentials."""
