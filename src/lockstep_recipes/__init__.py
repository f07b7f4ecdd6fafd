"""The built-in recipes: one package each, with the same file names in every one."""
