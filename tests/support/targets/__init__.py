"""Programs that tests trace."""
