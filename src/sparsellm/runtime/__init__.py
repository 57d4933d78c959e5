"""Devices, memory, offloading of tensor lists, and collectives between processes.

Knows nothing of models. Imports only `errors`.
"""
