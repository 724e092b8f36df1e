"""The public interface of kinetod: generated messages and the addresses."""
