"""The live view of `kinetoctl top`: keys and samples go in, a picture of the terminal's size comes out."""
