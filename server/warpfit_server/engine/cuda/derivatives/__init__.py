"""The bytecode interpreter of programs with their derivatives."""
