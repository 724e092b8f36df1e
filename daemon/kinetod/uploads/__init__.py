"""Uploads captures to object storage and reads them back, in a worker process."""
