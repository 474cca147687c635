"""What happened to a job, and how much of its time was training."""
