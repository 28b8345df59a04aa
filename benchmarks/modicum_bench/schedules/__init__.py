"""What a schedule of clipping bounds gains over the best constant, and how much of it adaptive methods get."""
