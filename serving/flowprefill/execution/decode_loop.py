"""Decoding in its own thread, for pods that only decode. See `decode.py` for the interface."""
