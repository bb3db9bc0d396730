"""What is measured at length: acceptance traces, times of real steps, and the proof of emitted tokens."""
