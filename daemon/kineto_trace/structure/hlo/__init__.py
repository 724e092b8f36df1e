"""From kernels to the HLO instructions of the modules that launched them."""
