"""Everything is in pyproject.toml, but the description: an index page shows README.md without links into this checkout."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text()
without_images = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)", "", readme)
setup(
    long_description=re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", without_images),
    long_description_content_type="text/markdown",
)
