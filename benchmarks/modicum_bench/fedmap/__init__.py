"""FedMAP's tables at true budgets, with the null models that a learned policy has to beat."""
