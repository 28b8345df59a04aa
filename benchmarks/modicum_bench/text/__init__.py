"""Private learning from texts: a public encoder and a head, at true budgets."""
