"""Benchmarks: loads, open-loop replay, reports, the demonstration and the figures."""
