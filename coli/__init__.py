"""coli runs Mixture-of-Experts models that are larger than RAM, on a CPU and a disk."""

__version__ = "0.1.0"
