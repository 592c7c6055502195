"""numba kernels: arrays in, arrays out. The only package that imports numba; it never opens a file nor reads a setting."""
