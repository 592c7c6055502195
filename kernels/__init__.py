"""numba kernels: arrays in, arrays out. The only package that imports numba; it never opens a model file nor reads a
setting. `runtime.configure` comes before the first call; importing any module compiles nothing."""
