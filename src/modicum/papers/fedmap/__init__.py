"""FedMAP.

`method` is the composition, `metanet` its policy (`network` and `bert` what that computes), `raw_metanet` Alg. 1
as printed, `fit` and `utility` the offline phase, `accounting` its ε as printed.
"""
