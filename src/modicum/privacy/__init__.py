"""What a run guarantees and what it costs; knows no model.

The words that all share are here: `spec` and `views` (what is protected, from whom), `events` (what happened) and
`plan` (what was agreed). Four packages stand on them: `accounting` (what events cost), `noise` (how much, and from
where), `ledger` (what was reserved and released), `lifetime` (what all runs together may learn). `certificate` and
`verify` draw the conclusion.
"""
