"""Protein side chains on a fixed backbone, by masked (absorbing) discrete diffusion."""
