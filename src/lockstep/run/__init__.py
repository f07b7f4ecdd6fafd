"""A run: built, resumed, evaluated, saved and recorded."""
