"""Print the cheat sheet of the built site as docs/cheat_sheet.pdf: `make slides`.

Needs Chromium, as the site's tests in a browser do.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
SITE = DOCS.parent / "build" / "site"


def digest() -> bytes:
    """The version of the page, as a comment at the end of the file."""
    return b"%% %s\n" % hashlib.sha256((DOCS / "cheat_sheet.md").read_bytes()).hexdigest().encode()


def write(path: Path) -> None:
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from chromium import Chromium

    with tempfile.TemporaryDirectory() as folder:
        browser = Chromium(folder)
        browser.open(f"file://{SITE}/docs/cheat_sheet.html")
        browser.run("document.querySelectorAll('a').forEach(link => link.removeAttribute('href'))")
        path.write_bytes(browser.printed() + digest())
        browser.close()


if __name__ == "__main__":
    write(DOCS / "cheat_sheet.pdf")
