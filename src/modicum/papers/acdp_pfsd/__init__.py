"""ACDP-pFSD and the personalised methods that it compares with.

`method` is the composition, `ppo` and `bandit` its policies, `distilled` its training, `raw_metrics` what it
sends as printed, `pretrain` the agent's offline phase, `accounting` its ε as printed.
"""
