"""The bytecode interpreter: programs are lowered on the device and run in one launch."""
