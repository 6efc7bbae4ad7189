"""What a client does with a call, without input or output: arguments, attempts, results."""
