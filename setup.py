"""Package metadata; the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_router_replay/__init__.py").read_text())
assert VERSION is not None

# Nothing here bounds the Megatron-Core that a user has: whether it can be replayed is asked at run time (mcore/compat.py).
MEGATRON = ["megatron-core>=0.16"]
# What our own tests and demo run with. From 0.18 on it imports triton, which no CPU build of torch brings.
TESTED_MEGATRON = [
    "megatron-core>=0.16.1,<=0.19.2",
    "triton>=3; python_version >= '3.12' and sys_platform == 'linux'",
]
DEMO = [*TESTED_MEGATRON, "rich>=13", "typer>=0.15"]
PAGE = ["jinja2>=3.1"]
PLOT = ["matplotlib>=3.9"]
RAY = ["ray>=2.40"]
FAST = ["pybase64>=1.4"]
ZSTD = ["zstandard>=0.23"]

setup(
    name="megatron-router-replay",
    version=VERSION.group(1),
    description="Record which experts a Mixture-of-Experts model used, and make Megatron-Core use exactly those again.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_router_replay*"]),
    package_data={
        "megatron_router_replay": ["py.typed"],
        "megatron_router_replay.demo": ["data/*.json", "data/*/*"],
        "megatron_router_replay.diagnostics": ["*.jinja"],
    },
    # transformer-engine and apex are what Megatron-Core uses on CUDA machines; this package never needs them.
    install_requires=[
        "numpy>=1.26",
        "safetensors>=0.5",
        "torch>=2.6",
    ],
    extras_require={
        "demo": DEMO,
        "fast": FAST,
        "megatron": MEGATRON,
        "zstd": ZSTD,
        "ray": RAY,
        "page": PAGE,
        "plot": PLOT,
        "triton": ["triton>=3"],
        "test": [
            *DEMO,
            *FAST,
            *PAGE,
            *PLOT,
            *RAY,
            *ZSTD,
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pdoc>=15",
            "pytest>=8",
            "ruff>=0.9",
            "transformers>=5,<6",
        ],
    },
    entry_points={"console_scripts": ["router-replay = megatron_router_replay.cli:app"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
