"""Accelerators that do not exist: what the kernel, a vendor's library or torch shows of them."""
