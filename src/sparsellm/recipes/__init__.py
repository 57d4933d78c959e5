"""Recipes: their fields, files and words in Python, the methods that they name, and the layers that they select.

Imports `methods` and the folders above it.
"""
