"""The router's HTTP front: client connections, routes, and the endpoints that the router answers itself."""
