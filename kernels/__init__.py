"""numba kernels: arrays in, arrays out. The only package that imports numba, and that only to compile; it never opens a
model file nor reads a setting. `runtime.configure` comes before the first call; importing a module compiles nothing."""
