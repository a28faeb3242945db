"""The front: connections of clients, requests on their way, and the API around them."""
