"""The four papers as printed, sound, and what we would use, each with the ε claimed and the true one."""
