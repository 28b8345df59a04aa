"""Networks that others trained on public records and published: read safely, and used for their features alone."""
