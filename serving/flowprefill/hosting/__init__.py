"""What the proxy and the pods share as HTTP servers: phases from start to stop, the admin port, errors as responses."""
