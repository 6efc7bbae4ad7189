"""Tenants and their shares: authentication, limits, quotas, admission."""
