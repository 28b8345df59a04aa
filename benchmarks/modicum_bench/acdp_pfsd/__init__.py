"""The experiments of ACDP-pFSD, with its baselines and the rows that the paper lacks."""
