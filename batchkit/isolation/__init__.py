"""Child processes for code that may hang, crash or exhaust memory.

- ``server``: a process that imports the code of a handler, and then forks a child per request.
- ``client``: starts servers and sends questions to their children.

A handler is a module with a function ``main``, which gets the connection to the client. ``pdf_child`` is one; others
are beside the code that uses them. An engine that holds a model is a handler, too.
"""
