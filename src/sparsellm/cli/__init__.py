"""The command line: one file a command, its options, the progress display and the tables.

Nothing imports this folder but `__main__`.
"""
