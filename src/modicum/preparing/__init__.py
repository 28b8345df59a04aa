"""What comes before a training: a look at the data."""
