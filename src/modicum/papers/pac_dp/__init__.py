"""PAC-DP (Zhou et al.) and rPDP-FL, which it compares with.

`method` is the composition, `curve` and `schedule` its policy, `fit` and `grid` the offline phase, `bounds` and
`surrogate` its theory, `accounting` its ε as printed.
"""
