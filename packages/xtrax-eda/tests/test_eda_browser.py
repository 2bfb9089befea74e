"""The page in a real Chromium: what its script computes, by keyboard, on a phone, and without a network."""

import json

import pytest

from xtrax.eda import render


@pytest.fixture
def opened(browser, foreign, tmp_path):
    """Opens the page of a plan that has every kind of axis and needs 1,500 of `budget` bytes."""

    def open_(budget=2_000, **options):
        path = tmp_path / "plan.html"
        render(foreign.all_kinds(budget), path=path, lengths=foreign.lengths)
        browser.log("browser")  # forget what earlier pages said
        browser.log("performance")
        browser.open(path, **options)
        return browser

    return open_


def now(page, axis):
    return page.text(f"#axis-{axis} > .now")


def test_no_errors_and_no_network(opened):
    page = opened()
    assert page.log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert urls, "the request for the page itself is missing, so this test sees nothing"
    assert [url for url in urls if not url.startswith(("file:", "data:"))] == []


def test_stepping_through_is_the_nested_loop(opened):
    page = opened()
    loop = [
        (bucket, length, chunk, step)
        for bucket, length in ((0, 4), (0, 8))
        for chunk in ("0 to 3", "2 to 5", "6 to 9")  # the first two share elements
        for step in range(5)
    ]
    assert "30 steps, one after another" in page.text("#stepper output")
    seen = page.run(
        """
        const range = document.querySelector("#step"), seen = [];
        for (let step = 1; step <= +range.max; step++) {
          range.value = step;
          range.dispatchEvent(new Event("input"));
          seen.push([0, 2, 3].map((i) => document.querySelector(`#axis-${i} > .now`).textContent));
        }
        return seen;
        """
    )
    expected = [
        [
            f"now: batch {bucket + 1} of 1, padded to length {length}",
            f"now: elements {chunk}",
            f"now: element {step}",
        ]
        for bucket, length, chunk, step in loop
    ]
    assert seen == expected
    assert now(page, 1) == "now: every distinct element"
    assert now(page, 4) == "now: elements 0 to 2"


def test_the_keyboard_reaches_and_moves_everything(opened):
    page = opened()
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(40):
        page.tools("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        page.tools("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(page.run("const e = document.activeElement; return e.id || e.className || e.textContent"))
    for control in ("skip", "step", "next", "play", "size-2", "size-4", "try-0"):
        assert control in reached, reached
    page.keys("#step", "\ue014")  # the right arrow
    assert page.text("#stepper output").startswith("Step 2 of 30: text, batch 1 of 1, padded to length 4;")
    page.click("#stepper .next")
    assert now(page, 3) == "now: element 2"
    page.click("#stepper .back")
    assert now(page, 3) == "now: element 1"


def test_playing_ends_at_the_last_step(opened):
    page = opened()
    page.run(
        "document.querySelector('#step').value = 29; document.querySelector('#step').dispatchEvent(new Event('input'))"
    )
    page.click("#stepper .play")
    page.run(
        """
        return new Promise((done) => {
          const wait = setInterval(() => {
            if (document.querySelector(".play").textContent === "Play") { clearInterval(wait); done(true); }
          }, 20);
        });
        """
    )
    assert page.run("return document.querySelector('#step').value") == "30"
    assert page.run("return document.querySelector('#stepper .next').disabled") is True


def test_a_slider_moves_the_estimate_along_its_slope(opened):
    page = opened()
    assert page.text("#memory-verdict") == "1.5 kB of 2 kB: fits"
    page.keys("#size-2", "\ue014" * 2)  # from 4 to 6 elements of 200 bytes
    assert page.text("#memory-verdict") == "1.9 kB of 2 kB: fits"
    assert page.text("#memory-2 .bytes") == "1.2 kB"
    assert page.text("#memory-2 .turns") == "6 at once, 2 steps"
    page.keys("#size-2", "\ue014")
    assert page.text("#memory-verdict") == "2.1 kB: 100 B over the budget of 2 kB"
    assert page.run("return document.querySelector('#memory-verdict').className") == "total over"
    red = page.run("return getComputedStyle(document.querySelector('#memory-total .toomuch')).backgroundColor")
    assert red == "rgb(189, 30, 40)"
    share = page.run(
        """
        const bar = document.querySelector("#memory-total");
        return bar.querySelector(".toomuch").getBoundingClientRect().width / bar.getBoundingClientRect().width;
        """
    )
    assert share == pytest.approx(100 / 2_100, abs=0.002)
    assert page.text("#what-if pre") == 'AxisSpec("sample", cardinality=10, default_batch_size=7)'
    page.click("#what-if .reset")
    assert page.text("#memory-verdict") == "1.5 kB of 2 kB: fits"
    assert page.run("return document.querySelector('#what-if pre').hidden") is True


@pytest.mark.parametrize(("budget", "largest"), [(2_000, 6), (1_700, 5), (2_700, 10), (10_000, 10)])
def test_the_largest_that_fits_is_the_largest(opened, budget, largest):
    page = opened(budget)
    # fixed 400, 300 for the head, 200 for each of the sample
    assert largest == max(n for n in range(1, 11) if 700 + 200 * n <= budget)
    button = "#memory-2 .control button"
    assert page.text(button) == f"Largest that fits: {largest}"
    page.click(button)
    assert page.run("return document.querySelector('#size-2').value") == str(largest)
    assert page.text("#memory-verdict").endswith("fits")


def test_where_nothing_fits_it_says_so(opened):
    page = opened(800)
    assert page.text("#memory-2 .control button") == "None fits"
    assert page.run("return document.querySelector('#memory-2 .control button').disabled") is True
    assert page.text("#memory-verdict") == "1.5 kB: 700 B over the budget of 800 B"


def test_a_number_out_of_range_is_brought_back(opened):
    page = opened()
    page.run(
        """
        const number = document.querySelector('#memory-2 input[type=number]');
        number.value = 99;
        number.dispatchEvent(new Event('input'));
        number.dispatchEvent(new Event('change'));
        """
    )
    assert page.run("return document.querySelector('#size-2').value") == "10"


def test_other_boundaries_are_tried(opened):
    page = opened()

    def attempt(text):
        page.run(
            "const i = document.querySelector('#try-0'); i.value = arguments[0]; i.dispatchEvent(new Event('input'))",
            text,
        )
        return page.text(".try-boundaries output")

    assert attempt("4, 8") == "25 % padding, 2 programs to compile."  # 18 of 4 + 4 + 8 + 8
    assert attempt("1 4 5 8") == "0 % padding, 4 programs to compile."
    assert attempt("8") == "43.8 % padding, 1 program to compile."  # 18 of 32
    assert attempt("4, 7") == "The longest element has length 8: add a boundary of at least that."
    assert attempt("8, 4") == "Each boundary must be larger than the one before."
    assert attempt("") == attempt("x") == attempt("1.5") == "Write whole numbers of at least 1, such as 16, 32, 64."


@pytest.mark.parametrize("width", [320, 390, 1100])
def test_nothing_is_wider_than_the_screen(opened, width):
    page = opened(width=width)
    assert page.run("return document.documentElement.scrollWidth") <= width


def test_long_names_do_not_widen_the_page(browser, foreign, tmp_path):
    path = tmp_path / "long.html"
    plan = foreign.plan(
        *(foreign.decision(f"{i}" + "x" * 300, 100, 32, foreign.SafeMap(32), "y" * 500) for i in range(12)),
        memory=foreign.memory(10**9, 10**8, {"0" + "x" * 300: 1e6}),
    )
    render(plan, path=path, title="z" * 400)
    browser.open(path, width=390)
    assert browser.run("return document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("dark", "ground"), [(False, "rgb(246, 246, 243)"), (True, "rgb(18, 21, 24)")])
def test_the_page_follows_the_colour_scheme(opened, dark, ground):
    page = opened(dark=dark)
    assert page.run("return getComputedStyle(document.body).backgroundColor") == ground


def test_a_screen_reader_hears_the_nest_and_the_controls(opened):
    page = opened()
    nodes = page.tools("Accessibility.getFullAXTree")["nodes"]
    said = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and "role" in node
    ]
    for expected in (
        ("heading", "How it runs"),
        ("heading", "sample"),
        ("image", "3 chunks of 4, 2 computed twice"),
        ("slider", "Step through the run"),
        ("slider", "Elements of sample at once"),
        ("button", "Largest that fits: 6"),
        ("textbox", "Try other boundaries on these lengths"),
        ("columnheader", "Because"),
        ("region", "Memory"),
    ):
        assert expected in said, expected
    unnamed = [
        (role, name) for role, name in said if role in ("slider", "button", "spinbutton", "textbox") and not name
    ]
    assert unnamed == []


def test_without_script_the_page_still_tells_everything(browser, opened):
    browser.tools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page = opened()
        text = page.tools("DOM.getDocument")  # the tree, since no script can run
        html = page.tools("DOM.getOuterHTML", nodeId=text["root"]["nodeId"])["outerHTML"]
    finally:
        browser.tools("Emulation.setScriptExecutionDisabled", value=False)
    assert "Fits: 1.5 kB of 2 kB, 75 % of the budget." in html
    assert 'id="stepper" hidden' in html  # no control that would do nothing
    assert '<div class="control" hidden' in html
