"""Attributes hardware counters to kernels, operators, modules, steps and collectives."""
