"""Every record-level method on the same features, budgets and starts, with one rule for choosing settings."""
