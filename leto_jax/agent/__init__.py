"""The agent: starts the processes of a job, sees them fail, decides, promotes. No JAX here."""
