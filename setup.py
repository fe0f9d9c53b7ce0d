"""Lists the packages inside each folder of the `package-dir` table in pyproject.toml.

setuptools' own discovery cannot add a prefix to what it finds, so the root folder `kernels/`
would be found as the package `kernels` instead of `specdec.kernels`.
"""

import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

pyproject = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
folders = pyproject["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        name
        for package, folder in folders.items()
        for name in (
            package,
            *(f"{package}.{sub}" for sub in find_namespace_packages(folder)),
        )
        if "__pycache__" not in name
    ]
)
