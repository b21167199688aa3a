"""SLURM: sites, placement by device key, the devices of an allocation, environments. Loads no framework."""
