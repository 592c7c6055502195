"""Config, families, weights and the forward."""
