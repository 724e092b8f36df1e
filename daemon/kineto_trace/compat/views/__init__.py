"""Registers the figures of HTA and of the TensorBoard plug-in with the views that know nothing of them."""
