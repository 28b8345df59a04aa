"""Attacks that look for records in one message. Each is given messages and public facts, and returns a guess."""
