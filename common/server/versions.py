"""Versions for ``GET /version`` and ``build_info``, read from package metadata: nothing is imported for it."""

from __future__ import annotations

import functools
import importlib.metadata

# The first that is installed counts. NIXL's wheels are of one version; which is there depends on torch's CUDA.
_DISTRIBUTIONS = {
    "tandem": ("tandem-serve",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "nixl": ("nixl-cu13", "nixl-cu12", "nixl"),
}


def installed_versions() -> dict[str, str | None]:
    """Versions of ``tandem``, ``torch``, ``transformers`` and ``nixl``; None for what is not installed."""
    return {
        name: next(filter(None, map(_version, distributions)), None) for name, distributions in _DISTRIBUTIONS.items()
    }


def build_labels() -> dict[str, str]:
    """Labels of the ``build_info`` metric; empty for what is not installed."""
    versions = installed_versions()
    return {"version": versions.pop("tandem") or "", **{name: version or "" for name, version in versions.items()}}


@functools.cache  # reads a file
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
