"""This machine as tests need it: compilers, kernels, control groups, namespaces, GPUs."""
