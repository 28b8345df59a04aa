"""The same experiment over Flower's deployment engine: separate processes or machines, silos that trust nobody."""
