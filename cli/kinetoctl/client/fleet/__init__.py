"""Takes one capture on many hosts: begins it everywhere at one time, follows it, and brings and merges its files."""
