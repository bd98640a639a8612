"""Runs untrusted templates and schemas in separate, bounded processes.

Imports nothing of the package. Read `process` first; the other files are the processes' programs.
"""
