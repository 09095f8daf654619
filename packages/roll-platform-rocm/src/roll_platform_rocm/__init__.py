"""ROLL's platform for GPUs of AMD."""
