"""Pure scheduling: events in, actions out. No clock, no I/O, no threads."""
