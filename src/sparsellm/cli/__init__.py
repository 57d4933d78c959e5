"""The command line: the commands of the core, their options, and the tables.

Imported by `__main__` and by commands of extensions.
"""
