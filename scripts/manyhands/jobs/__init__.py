"""Job files for PBS and Slurm: a site's settings in them, and a job's life."""
