"""Lowering on the host: from postfix tokens to scheduled instructions."""
