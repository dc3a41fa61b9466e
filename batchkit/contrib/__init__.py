"""Plug-ins inside the package. They import only the public modules that docs/plugins.md lists."""
