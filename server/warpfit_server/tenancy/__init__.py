"""Who may use how much: authentication, tenants, limits, quotas, admission."""
