"""Compiled arithmetic for CPUs and GPUs, and where it runs (`supports`). Imports no model; read `supports` first."""
