"""Child processes for code that may hang, crash or exhaust memory.

- ``server``: a process that imports the code of a handler, and then forks a child per request.
- ``client``: starts servers and sends questions to their children.

A handler is a module with a function ``main``, which gets the connection to the client, for example ``pdf_child``. Some
handlers are in other packages: ``engines/process/child.py`` runs an engine that holds a model.
"""
