"""python scripts/make_report_picture.py docs/howto/report.png --config configs/405b.yaml

Draws the first panels of the report on a plan. Needs playwright, and a Chromium that is on the path or that
`playwright install chromium` has installed.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from shardplan import config

WIDTH, HEIGHT = 1200, 1500
"""Size of the picture in pixels: up to the end of the chart of memory."""


def main() -> None:
    """Make the plan that the command line describes, and write a picture of its report."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.report.page.page import plan_page
    from shardplan.search.make_plan import make_plan

    target, *arguments = sys.argv[1:]
    settings = config.parse_config(arguments)
    page = plan_page(make_plan(settings), [], settings.levanter_schema)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "plan.html"
        path.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(path.as_uri())
        tab.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    main()
