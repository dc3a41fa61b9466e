"""Makes requests from rows."""
