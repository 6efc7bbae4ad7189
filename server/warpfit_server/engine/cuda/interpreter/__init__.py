"""The bytecode interpreter, and the lowering of batches on the device."""
