"""For tools that ask for it; what it says is in pyproject.toml."""

from setuptools import setup

setup()
