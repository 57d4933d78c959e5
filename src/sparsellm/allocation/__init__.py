"""How many weights each layer keeps: scores of layers (OWL, Fisher), and the budget of zeros that they share.

Imports `methods` and the folders above it.
"""
