"""Opens a report page in Chromium and collects its errors, requests and texts."""

import contextlib
import json
import os
import pathlib
import shutil

from playwright.sync_api import sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")

# Finds the point of a curve that is farthest from all other curves, so that it is clear which one the mouse is on.
# Returns its position in the window. Skips panels in which the curve is not visible.
FIND_POINT = """
([figure, name]) => {
  const points = (path) => [...path.getAttribute("d").matchAll(/(-?[\\d.]+),(-?[\\d.]+)/g)]
    .map(([, x, y]) => ({x: Number(x), y: Number(y)}));
  for (const svg of figure.querySelectorAll("svg:has(path.curve)")) {
    const curves = [...svg.querySelectorAll("path.curve")];
    const own = curves.find((path) => path.dataset.name === name);
    if (!own) continue;
    const others = curves.filter((path) => path !== own).flatMap(points);
    const area = svg.querySelector(".hit").getBBox();
    const inside = ({x, y}) => x >= area.x && x <= area.x + area.width && y >= area.y &&
      y <= area.y + area.height;
    const free = (point) => Math.min(Infinity, ...others
      .filter((other) => Math.abs(other.x - point.x) < 1)
      .map((other) => Math.abs(other.y - point.y)));
    const seen = points(own).filter(inside);
    if (!seen.length) continue;
    const best = seen.reduce((a, b) => (free(b) > free(a) ? b : a));
    const place = new DOMPoint(best.x, best.y).matrixTransform(own.getScreenCTM());
    return [place.x, place.y];
  }
  return null;
}
"""


def is_own(url, path):
    return url.partition("#")[0] == path.as_uri() or url.startswith("data:")


@contextlib.contextmanager
def open_page(path, color_scheme="light", width=1280, touch=False):
    """The page, and a list that collects problems: errors, dialogs, and requests for anything else."""
    path = pathlib.Path(path).resolve()
    problems = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        size = {"width": width, "height": 900}
        page = browser.new_page(color_scheme=color_scheme, viewport=size, has_touch=touch)
        page.on(
            "console",
            lambda line: problems.append(f"console: {line.text}") if line.type == "error" else None,
        )
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append("a dialog opened"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                None if is_own(request.url, path) else problems.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        yield page, problems
        browser.close()


def hover_curve(page, figure_selector, name):
    """Moves the mouse to a point of the curve and returns the tooltip's text."""
    figure = page.locator(figure_selector).first
    curve = figure.locator(f"path.curve[data-name={json.dumps(name)}]").first
    curve.wait_for(state="attached")
    curve.locator("xpath=ancestor::*[local-name()='svg'][1]").scroll_into_view_if_needed()
    place = page.evaluate(FIND_POINT, [figure.element_handle(), name])
    assert place, f"no point of {name} can be seen in {figure_selector}"
    page.mouse.move(*place)
    tooltip = page.locator(".tooltip")
    tooltip.wait_for(state="visible")
    return tooltip.inner_text()
