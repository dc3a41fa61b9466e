"""A row becomes a request."""
