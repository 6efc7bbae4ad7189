"""The operations of a client without input or output: arguments, retries, results."""
