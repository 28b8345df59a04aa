"""FedCompDP's Tables I and II at a true ε, with its five baselines and the parts taken out one by one."""
