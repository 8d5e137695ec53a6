"""From what is known of a service to its status. Pure: values in, values out, the time included."""
