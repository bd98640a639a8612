"""Matrices as they are held and multiplied. Imports no model; read `linear` first."""
