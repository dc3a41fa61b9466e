"""Reading and checking job files, and reporting the mistakes in them."""
