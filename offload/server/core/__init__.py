"""Shared by all protocols: bodies, jobs, growing answers, events, refusals."""
