"""Engines evaluate batches on resident data sets; they know nothing of gRPC or processes."""
