"""SLURM: placement by device key, the devices of an allocation, environments, jobs and their states. Loads no framework."""
