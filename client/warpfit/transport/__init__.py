"""How a client reaches servers: addresses, settings, credentials, choice, gRPC channels."""
