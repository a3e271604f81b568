"""Conformance: for each declared kernel, cases drawn from its Support and its edges, judged against the reference.

Imported with the folder `tests` on sys.path, by tests/test_conformance.py and benchmarks/record_conformance.py.
"""
