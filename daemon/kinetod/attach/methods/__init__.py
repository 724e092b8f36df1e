"""Contains the ways to make a target run our code, and the machine code that they copy into it."""
