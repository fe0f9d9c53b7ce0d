"""Speculative decoding as four plain functions around one step; see README.md for the map.

In a source tree `kernels/`, `models/`, `experiments/` and `conf/` lie beside this folder and are
imported as `specdec.kernels` and so on; in a wheel they lie inside it. `kernels/` has no
`__init__.py` on purpose: a namespace folder gives way to the public package `kernels`, which
transformers imports, even when a script at the root puts the root first on `sys.path`.
"""

from pathlib import Path

_package = Path(__file__).resolve().parent
if not (_package / "kernels").is_dir():
    __path__.append(str(_package.parent))
