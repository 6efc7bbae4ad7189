"""Resident data sets."""
