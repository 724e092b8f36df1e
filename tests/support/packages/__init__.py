"""What tests fetch from package archives."""
