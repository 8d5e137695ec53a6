"""One builder for each kind of object that a FlowPrefillService owns. Pure: values in, plain mappings out."""
