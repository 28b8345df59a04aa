"""FedCompDP (arXiv 2602.06838) and the record-level methods that it compares with.

`method` is the composition, `constraint_aware` and `d_norm` its aggregation, `batch_clipped` its mechanism
as printed, `accounting` its ε as printed.
"""
