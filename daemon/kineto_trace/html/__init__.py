"""One page with the analyses of a job: charts and tables in a file that needs nothing else."""
