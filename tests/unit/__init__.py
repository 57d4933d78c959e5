"""Tests of single functions; they load no model of transformers."""
