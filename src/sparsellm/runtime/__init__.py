"""Devices, memory, offloaded tensor lists, and collectives between processes.

Independent of models. Imports only `errors`.
"""
