"""What campaigns put together: hosts under load, faults, hostile users, fleets."""
