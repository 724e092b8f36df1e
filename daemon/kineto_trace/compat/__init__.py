"""Reproduces the figures of other trace tools by their exact rules."""
