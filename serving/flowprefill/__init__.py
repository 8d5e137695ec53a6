"""Preemptive prefill serving that keeps TTFT promises (FlowPrefill, arXiv:2602.16603)."""
