"""Prefill, decode and colocated servers: HTTP in front of the scheduler thread and the decode loop."""
