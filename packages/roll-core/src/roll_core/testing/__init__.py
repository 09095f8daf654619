"""Tiny models, fakes and checks for the tests of the core and of plugins."""
