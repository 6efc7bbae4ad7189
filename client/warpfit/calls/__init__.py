"""What a call takes and what it returns, without any input or output."""
