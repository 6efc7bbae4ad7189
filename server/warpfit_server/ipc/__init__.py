"""Between front end and engine: messages, connection, segments of shared memory."""
