"""A real headless Chromium on MLflow's page: what the tests of the page and the pictures of the docs share."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

#: A page may take so long to show what it should, on a busy machine; usually it is two seconds.
PATIENCE_S = 60.0
REQUIRED = "MEMORY_SWEEP_REQUIRE_BROWSER"

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)

#: Every row that the table shows, from the top: column id to text. The grid draws the rows in sight only.
ROWS = """
const rows = {};
for (const row of document.querySelectorAll('.ag-row')) {
  const cells = rows[row.getAttribute('row-index')] ??= {};
  for (const cell of row.querySelectorAll('.ag-cell')) cells[cell.getAttribute('col-id')] = cell.innerText.trim();
}
return Object.keys(rows).sort((a, b) => a - b).map(index => rows[index]);
"""

#: MLflow's page asks new visitors to talk to an assistant, over a third of the window.
SETTLED = {"mlflow.assistant.panelOpen_v1": "false", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true"}


def programs() -> tuple[str, str] | None:
    """Chromium and its driver, where both are installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def programs_or_skip() -> tuple[str, str]:
    found = programs()
    if found is None:
        reason = "Chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{reason}, and {REQUIRED}=1 asks for them")
        pytest.skip(reason)
    return found


class Page:
    """MLflow's page at `address`, in a browser of its own."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver, self.address = driver, address
        driver.get(f"{address}/#/settings")
        for name, value in SETTLED.items():
            self.run("localStorage.setItem(arguments[0], arguments[1])", name, value)

    def open(self, path: str) -> None:
        """Load the page anew: a change behind the # alone would keep what was there."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/{path}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """What `condition` gives once it is true. `what` says what was waited for, should it never be."""
        # While the page is being drawn, elements come, go and cover each other.
        wait = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.1, ignored_exceptions=[WebDriverException])
        try:
            return wait.until(lambda _: condition())
        except TimeoutException:
            there = f"{self.driver.current_url}\n{self.text()[:3000]}"
            pytest.fail(f"not shown after {PATIENCE_S:g} s: {what}; there is: {there}", pytrace=True)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def shows(self, *words: str) -> None:
        """Wait until all the words are on the page."""
        for word in words:
            self.until(repr(word), lambda word=word: word in self.text())

    def click(self, selector: str, text: str | None = None) -> None:
        """Click an element, one with exactly this text where one is given."""
        script = """
        return [...document.querySelectorAll(arguments[0])]
          .filter(e => (arguments[1] === null || e.textContent.trim() === arguments[1]) && e.getClientRects().length)
          .at(-1)
        """

        def clicked() -> bool:
            element = self.run(script, selector, text)  # the last is the innermost
            if element is not None:
                element.click()  # as a person does it: some menus do not open by a script's click
            return element is not None

        self.until(f"{selector} {text or ''}", clicked)

    def rows(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.run(ROWS)
        return [row for row in found if row.get("attributes.`Run Name`")]

    def until_rows(self, count: int) -> list[dict[str, str]]:
        """The rows in sight, once MLflow says that so many runs match."""
        said = f"{count} matching run"
        found: list[dict[str, str]] = self.until(said, lambda: said in self.text() and self.rows())
        return found

    def columns(self) -> list[str]:
        """The table's columns from left to right, as far as they are in sight."""
        script = """
        return [...document.querySelectorAll('.ag-header-cell[col-id]')]
          .map(e => [e.getBoundingClientRect().left, e.innerText.trim()])
          .sort((a, b) => a[0] - b[0]).map(pair => pair[1]).filter(name => name)
        """
        return list(self.run(script))

    def picture(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def open_page(address: str, width: int = 1900, height: int = 1400) -> Iterator[Page]:
    """A new browser with an empty profile, closed in the end."""
    found = programs()
    assert found is not None, "see programs_or_skip"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = found[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(found[1]))
        try:
            driver.set_page_load_timeout(PATIENCE_S)
            yield Page(driver, address)
        finally:
            driver.quit()
