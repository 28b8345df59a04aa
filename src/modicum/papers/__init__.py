"""Papers, a folder each with all that only it needs. Only `modicum.methods` and the commands import them."""
