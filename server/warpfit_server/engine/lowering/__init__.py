"""The host's lowering: from postfix tokens to instructions and their places."""
