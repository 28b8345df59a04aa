"""What is learned from public records before a run: features, a geometry, a first model. It costs no privacy."""
