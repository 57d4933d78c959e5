"""The command line: the commands, their options, the progress display and the tables.

Only `__main__` imports this folder.
"""
