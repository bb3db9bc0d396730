"""What is told before or beside a run: plans, forecasts, tuning, the proof of emitted tokens."""
