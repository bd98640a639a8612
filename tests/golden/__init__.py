"""The names that users and operators see, kept as text files beside this one: see
`tests/test_golden.py`.
"""
