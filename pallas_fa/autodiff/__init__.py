"""Derivatives of attention: the custom rules of a backend, forward mode, and second derivatives."""
