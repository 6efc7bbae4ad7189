"""The connection of a client to a server: settings, credentials, gRPC channel, health check."""
