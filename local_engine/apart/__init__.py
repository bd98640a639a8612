"""Work on what others wrote (templates, schemas), in processes of their own, with bounds.

Imports nothing of the package. Read `process` first; the other files are the processes' programs.
"""
