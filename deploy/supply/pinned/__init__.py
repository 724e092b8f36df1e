"""What the image and the packages are made of: locks with hashes, bills of materials, and the audit of both."""
