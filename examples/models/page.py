"""docs/examples.md: the table of all examples, and for each its picture and what is seen.

It is written from the examples' own files, from what `comparison.py` kept, and from `seen.py`.
"""

import importlib
import inspect
import math
import re

import pandas as pd
from comparison import PRIVATE, RESULTS, ROOT
from seen import SEEN

PAGE = ROOT / "docs" / "examples.md"
HEAD = """# Examples: Pyro's own models, swapped

`DPSVI` replaces `SVI` in twelve models of Pyro's documentation. At epsilon = 4, {close} of them
lose less than four nats. At epsilon = 1 the noise costs more, above all in models with many
parameters.

```diff
- {svi}
+ {dpsvi}
```

Nothing else changes in any of them. `python examples/models` fits all and writes this page.
Delta is 1e-5, with one run each. `SVI` takes 2,000 steps on all records. The column `SVI` has its
ELBO in nats, and the other columns have the difference to it. A normal posterior that is off by one
standard deviation in one coefficient loses half a nat.

"""


def text(rows: pd.DataFrame) -> str:
    """The text of the whole page, from the kept rows."""
    first = importlib.import_module(next(iter(SEEN)))
    nats = rows.pivot(index="example", columns="fit", values="elbo")
    close = (nats["DPSVI, epsilon 4"] > nats["SVI"] - 4).sum()
    head = HEAD.format(close=close, svi=swapped(first.svi), dpsvi=swapped(first.dpsvi))
    return head + table(rows) + "".join(section(name) for name in SEEN)


def table(rows: pd.DataFrame) -> str:
    lines = ["| model | records | `SVI` | " + " | ".join(PRIVATE) + " |", "|---" * 7 + "|"]
    for name in SEEN:
        one = rows[rows.example == name].set_index("fit")
        reached = one.elbo["SVI"]
        link = f"[![](figures/examples/{name}.png) {title(name)}](#{anchor(name)})"
        cells = [link, f"{one.N.iloc[0]:,}", f"{reached:,.0f}"]
        cells += [difference(one.elbo[fit] - reached) if fit in one.elbo else "" for fit in PRIVATE]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def difference(nats: float) -> str:
    if not math.isfinite(nats):
        return "not finite"
    return f"{round(nats, 1) + 0.0:+.1f}" if abs(nats) < 9.95 else f"{nats:+,.0f}"


def section(name: str) -> str:
    """The model's source, the picture, and its description."""
    example = importlib.import_module(name)
    heading, body = inspect.getdoc(example).split("\n\n", 1)
    question = heading.split(": ", 1)[1]
    file = f"examples/models/{name}.py"
    return f"""
## {title(name)}

{question[0].upper()}{question[1:]} {" ".join(body.split())} [{file}](../{file})

![{SEEN[name].alt}](figures/examples/{name}.png)

{SEEN[name].sentences}
"""


def swapped(function) -> str:
    """The code that `svi` or `dpsvi` returns, without the arguments that make a run repeat."""
    returned = inspect.getsource(function).split("return ")[1].replace(", **run", "")
    return " ".join(returned.split()).replace("( ", "(").replace(" )", ")")


def title(name: str) -> str:
    return inspect.getdoc(importlib.import_module(name)).split(":")[0]


def anchor(name: str) -> str:
    return re.sub(r"[^\w -]", "", title(name).lower()).replace(" ", "-")


def write() -> None:
    PAGE.write_text(text(pd.read_csv(RESULTS)))
