"""The resident data sets and their uploads."""
