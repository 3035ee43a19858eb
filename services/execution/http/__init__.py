"""What execution serves to the other services: logs and members of a job."""
