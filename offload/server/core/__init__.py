"""What every protocol shares: bodies, jobs, answers in the making, events, refusals."""
