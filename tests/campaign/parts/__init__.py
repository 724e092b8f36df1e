"""Building blocks of campaigns: hosts under load, faults, hostile users, fleets."""
