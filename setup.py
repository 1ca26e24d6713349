"""Everything is in pyproject.toml, but the description without links into this checkout, and a build without leftovers."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildAnew(build_py):
    """Builds into an empty folder: modules that were removed since the last build would be installed from it, too."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "megatron_router_replay", ignore_errors=True)
        super().run()


readme = Path(__file__).with_name("README.md").read_text()
without_images = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)", "", readme)
setup(
    cmdclass={"build_py": BuildAnew},
    long_description=re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", without_images),
    long_description_content_type="text/markdown",
)
