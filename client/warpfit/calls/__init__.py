"""Calls of a client: their arguments, the attempts at servers, and their results."""
