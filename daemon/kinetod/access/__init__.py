"""Who may do what: callers, roles, the decision, limits, the audit log."""
