"""What may hang, crash or eat memory runs in a process of its own.

``server`` forks such processes, each from one that has imported what they need, and ``client`` asks
them. A handler is a module with a function ``main``, which gets a connection to the client:
``pdf_child`` here, others beside what they serve; an engine that holds a model is one, too. ``confine`` takes all rights from a process.
"""
