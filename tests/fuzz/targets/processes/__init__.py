"""What a hostile process shows to the daemon."""
