"""Tests of the repository: who imports whom, documentation, benchmarks, the build."""
