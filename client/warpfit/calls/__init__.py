"""What a client does with a call: arguments, attempts at servers, results."""
