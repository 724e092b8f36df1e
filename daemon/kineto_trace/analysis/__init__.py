"""What columns say: figures for people and machines."""
