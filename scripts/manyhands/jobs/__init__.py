"""Write a site's settings into job files for PBS and Slurm, and submit and watch jobs."""
