"""A real Kubernetes control plane for tests: etcd, API server, controller manager, scheduler."""
