"""What is in the cluster, cut down to what decisions read."""
