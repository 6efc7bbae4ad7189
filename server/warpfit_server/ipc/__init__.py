"""Between front ends and engine: messages, connections, segments of shared memory, quarantine."""
