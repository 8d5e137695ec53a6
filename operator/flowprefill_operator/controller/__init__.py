"""The operator at work: what triggers a pass, what a pass does, and the process around it."""
