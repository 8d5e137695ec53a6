"""What the processes count. Metrics watch events and actions; no decision reads one back."""
