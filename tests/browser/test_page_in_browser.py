"""The report in a real browser: no errors, every panel has content, and what one clicks does something."""

import re
import shutil

import pytest

from shardplan.report.page.judgement import judge
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.torus import mesh_coordinates, tilings_of
from shardplan.search.make_plan import make_plan
from shardplan.verify.verdict import CompiledMemory, CompiledTime, LiveBytes, Outcome, Verdict

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Error, sync_playwright

PANELS = ("verdict", "torus", "memory", "time", "roofline", "candidates", "parameters", "yaml")
GIB = 2**30


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def plan():
    from shardplan import config

    arguments = ["--model.config=llama-3.1-8b", "--hardware.slice=v4-64", "--workload.batch=16"]
    return make_plan(config.parse_config([*arguments, "--mesh.model=4", "--mesh.replica=2"]))


@pytest.fixture(scope="module")
def path(plan, tmp_path_factory):
    live = [LiveBytes("embed", 2 * GIB), LiveBytes("mlp", 3 * GIB)]
    memory = CompiledMemory(3 * GIB, 2 * GIB, GIB, 0, 4 * GIB, [], live)
    time = CompiledTime(2.0, 1.5, 0.0, 0.0, 4e12, 0.25, {})
    verdict = Verdict(
        Outcome.FITS, None, "eval", "v4-64", plan.mesh, plan.compiler_options, "splash", 1.0, {},
        memory=memory, time=time,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(plan, [judge("this plan", plan, verdict)]), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, path, request):
    """The page, at a width and with a colour scheme; it must have made no error and no request at the end."""
    width, scheme = getattr(request, "param", (1200, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda made: requests.append(made.url))
    page.goto(path.as_uri())
    yield page
    context.close()
    assert not errors and requests == [path.as_uri()]


@pytest.mark.parametrize("page", [(w, s) for w in (400, 1600) for s in ("light", "dark")], indirect=True)
def test_nothing_is_wider_than_the_window(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for panel in PANELS:
        assert page.locator(f"#{panel}").bounding_box()["height"] > 80, panel
    for chart in page.locator(".plot").all():
        assert chart.locator(".mark").count() > 1
    sizes = "[...document.querySelectorAll('body *')].map((each) => parseFloat(getComputedStyle(each).fontSize))"
    assert min(page.evaluate(sizes)) >= 12


def test_colours_follow_the_scheme(browser, path):
    colours = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(path.as_uri())
        style = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        colours[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in style]
        page.close()
    assert colours["light"][0] < 200 < 600 < colours["light"][1]
    assert colours["dark"][1] < 200 < 600 < colours["dark"][0]


def tiles(page):
    return {int(cell.get_attribute("data-d")): cell.text_content() for cell in page.locator("#layers g").all()}


def test_a_tensor_shows_its_tiles(page, plan):
    for number in (0, len(plan.parameters)):
        page.select_option("#tensor", f"t{number}")
        tiling = tilings_of(plan)[number]
        expected = {device: str(tiling.tile(at)) for device, at in enumerate(mesh_coordinates(plan.mesh))}
        assert tiles(page) == expected
    page.select_option("#tensor", "amodel")
    assert set(tiles(page).values()) == {"0", "1", "2", "3"}


def test_the_path_of_a_parameter_leads_to_its_tiles(page, plan):
    page.select_option("#tensor", "amodel")
    page.get_by_role("button", name=plan.parameters[1].path).click()
    assert page.input_value("#tensor") == "t1"


def test_who_holds_the_same_tile(page, plan):
    """With the pointer, and with the keys."""
    tiling = tilings_of(plan)[-1]
    page.select_option("#tensor", f"t{len(plan.parameters)}")
    held = [tiling.tile(at) for at in mesh_coordinates(plan.mesh)]
    page.hover("#layers g[data-d='5']")
    same = [int(cell.get_attribute("data-d")) for cell in page.locator("#layers g.same").all()]
    assert sorted(same) == [device for device, tile in enumerate(held) if tile == held[5]]
    assert page.inner_text("#tip").startswith("device 5 (")
    page.mouse.move(0, 0)
    page.focus("#layers")
    page.keyboard.press("ArrowRight")
    assert page.locator("#layers g.on").count() == 1 and page.locator("#tip").is_visible()


def test_keys_step_through_the_values_of_a_chart(page, plan):
    page.focus("#memory .plot >> nth=0")
    for _ in plan.details.live:
        page.keyboard.press("ArrowRight")
    assert "GiB" in page.inner_text("#tip") and page.locator("#memory .mark.on").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_tables_sort(page, plan):
    table = page.locator("#parameter-table")
    sizes = "(table) => [...table.tBodies[0].rows].map((row) => Number(row.cells[3].dataset.value))"
    expected = sorted(each.bytes_per_device for each in plan.parameters)
    button = table.get_by_role("button", name="per device")
    button.click()
    assert table.evaluate(sizes) == expected[::-1]
    button.click()
    assert table.evaluate(sizes) == expected
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    table.get_by_role("button", name="parameter", exact=True).click()
    names = table.evaluate("(table) => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent)")
    assert set(names) == {each.path for each in plan.parameters} and names[0].startswith("embeddings")


def test_the_yaml_is_copied_or_selected(page):
    page.click("#copy")
    page.wait_for_function("document.getElementById('copied').textContent")
    assert page.inner_text("#copied") in ("copied", "selected: press Ctrl+C")


def test_printed_pages_show_everything(page):
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every((each) => each.open)")
    assert page.pdf()[:4] == b"%PDF"
