"""The Kubernetes API as the operator uses it: plain objects in and out, one error type for every answer."""
