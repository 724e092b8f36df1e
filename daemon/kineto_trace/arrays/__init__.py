"""Provides algorithms over whole columns of numbers, most of them in the native codec library."""
