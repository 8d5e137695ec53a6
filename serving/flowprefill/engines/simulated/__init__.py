"""An engine that sleeps as its cost model says, operator by operator: for cluster tests and for scale."""
