"""Engines run batches. One protocol (`protocol.py`), one contract suite, several implementations."""
