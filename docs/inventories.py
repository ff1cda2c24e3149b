"""Inventories of other projects' names that ours refer to: python docs/inventories.py writes them.

Sphinx links a name such as torch.Tensor by an inventory of its project. Those that projects publish
would have to be fetched, in each build or by somebody who then trusts them. These list the few
names that the site needs, each looked up in what is installed, and the page that documents it.
"""

import importlib
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent / "inventories"
# By project: a page, with $ for the name itself, and the names that it documents. After an equals
# sign comes the name on the page, if it differs.
PAGES = {
    "python": {
        "library/collections.abc.html#$": (
            "collections.abc.Callable",
            "collections.abc.Iterator",
            "collections.abc.Mapping",
            "collections.abc.Sequence",
        ),
        "library/os.html#$": ("os.PathLike",),
    },
    "numpy": {
        "reference/generated/$.html#$": ("numpy.ndarray", "numpy.dtype"),
        "reference/arrays.scalars.html#$": ("numpy.int64",),
        "reference/random/generator.html#$": (
            "numpy.random._generator.Generator=numpy.random.Generator",
        ),
        "reference/typing.html#$": ("numpy.typing.ArrayLike",),
    },
    "pandas": {"reference/api/$.html#$": ("pandas.DataFrame", "pandas.Series")},
    "torch": {
        "tensors.html#$": ("torch.Tensor",),
        "size.html#$": ("torch.Size",),
        "generated/$.html#$": ("torch._C.Generator=torch.Generator",),
        "distributions.html#$": (
            "torch.distributions.mixture_same_family.MixtureSameFamily",
            "torch.distributions.multivariate_normal.MultivariateNormal",
        ),
    },
    "pyro": {
        "distributions.html#$": (
            "pyro.distributions.distribution.Distribution",
            "pyro.distributions.torch.Dirichlet=pyro.distributions.Dirichlet",
        ),
        "inference_algos.html#$": ("pyro.infer.elbo.ELBO",),
        "infer.autoguide.html#$": (
            "pyro.infer.autoguide.guides.AutoGuide=pyro.infer.autoguide.AutoGuide",
        ),
        "optimization.html#$": ("pyro.optim.optim.PyroOptim",),
    },
}


def names(project):
    """Pairs of a name and where it is documented, for names that exist."""
    for page, listed in PAGES[project].items():
        for each in listed:
            name, _, documented = each.partition("=")
            module, _, last = name.rpartition(".")
            getattr(importlib.import_module(module), last)
            yield name, page.replace("$", documented or name)


def inventory(project):
    """The file's bytes: a head, and lines that are compressed."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    lines = [f"{name} py:class 1 {uri} -\n" for name, uri in sorted(names(project))]
    return head.encode() + zlib.compress("".join(lines).encode(), 9)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for project in PAGES:
        (FOLDER / f"{project}.inv").write_bytes(inventory(project))
