"""Uses the documentation's site as a reader would, in a headless Chromium: `make site`.

    python -m tests.docs.site [--browser /usr/bin/chromium] [--out DIR]

At 390, 1280 and 2560 pixels, light and dark: no page is wider than the window, nothing is fetched from elsewhere, the
navigation leads to a page, and the search finds one. Pictures of what was seen are in DIR.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
WIDTHS = {390: 844, 1280: 800, 2560: 1440}  # and heights
SCHEMES = ("light", "dark")
PAGES = (
    "",
    "start/",
    "guides/recipes/",
    "guides/rent/",
    "guides/troubleshooting/",
    "reference/compatibility/",
    "reference/cli/",
)
SOUGHT = ("power cut", "long-jobs")  # words, and a part of the address of a page that has them
MENU = 1220  # narrower windows have the navigation behind a button


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address at which ``directory`` is served."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=directory)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def faults_of(browser: Any, address: str, width: int, scheme: str, out: Path) -> Iterator[str]:
    """What a reader with such a window would complain about."""
    window = {"width": width, "height": WIDTHS[width]}
    page = browser.new_context(viewport=window, color_scheme=scheme).new_page()
    elsewhere: list[str] = []
    page.route(
        "**/*",
        lambda route: route.continue_() if route.request.url.startswith((address, "data:", "blob:")) else route.abort(),
    )
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("http:", "https:"))
            and not request.url.startswith(address)
            and elsewhere.append(request.url)
        ),
    )
    for name in PAGES:
        page.goto(address + name, wait_until="load")
        extent = page.evaluate("document.scrollingElement.scrollWidth")
        if extent > width:
            yield f"/{name} is {extent} pixels wide"
        picture = f"{width}-{scheme}-{name.strip('/').replace('/', '-') or 'index'}.png"
        page.screenshot(path=out / picture)
    page.goto(address, wait_until="load")
    if width < MENU:
        page.locator("label.md-header__button[for=__drawer]").click()
        page.locator("nav.md-nav--primary label.md-nav__link", has_text="Guides").first.click()
    page.locator("nav.md-nav--primary a.md-nav__link", has_text="Which machine should I rent?").first.click()
    page.wait_for_url("**/guides/rent/**")
    if page.locator("h1").first.inner_text().strip("¶ \n") != "Which machine should I rent?":
        yield "the navigation does not lead to the page that it names"
    words, wanted = SOUGHT
    if width < MENU:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    result = page.locator(f"a.md-search-result__link[href*='{wanted}']").first
    result.wait_for(state="visible")
    page.screenshot(path=out / f"{width}-{scheme}-search.png")
    result.click()
    page.wait_for_url(f"**/{wanted}/**")
    yield from (f"asks for {url}" for url in elsewhere)


def main() -> int:
    """Look at the site; returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site-pictures")
    arguments = parser.parse_args()
    if arguments.browser is None:
        sys.exit("make site needs a Chromium: apt-get install chromium, or ARGS='--browser PATH'")
    from playwright.sync_api import sync_playwright

    arguments.out.mkdir(parents=True, exist_ok=True)
    faults = list[str]()
    with served(SITE) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.browser, args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                told = [
                    f"{width} pixels, {scheme}: {fault}"
                    for fault in faults_of(browser, address, width, scheme, arguments.out)
                ]
                print(f"{width} pixels, {scheme}: {len(told)} faults")
                faults += told
        browser.close()
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
