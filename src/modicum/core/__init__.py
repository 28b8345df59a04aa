"""The vocabulary that every part of a round shares: parameter layout, messages, parts, the gate."""
