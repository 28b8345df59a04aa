"""PAC-DP's tables at true budgets: settings are chosen on public records, written down, and only then tested."""
