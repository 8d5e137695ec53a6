"""Carries the scheduler's actions out: the preemption gate, the pool of task threads, drivers, decode loops."""
