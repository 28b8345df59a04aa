"""What events cost: exact Gaussian composition, PLD for sampled Gaussians, RDP for filters."""
