"""Many clients' models as one batched computation: what makes simulations fast. A silo runs none of it."""
