"""What is drawn, as documents: complete, self-contained, safe against any name, and never half written."""

import json
import logging
import os
import re
import stat
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.eda import explain_plan, plan_to_dataframe, render
from xtrax.eda._palette import DARK, LIGHT, TINT, blend, contrast
from xtrax.tiling import AxisSpec, BatchPlanner

VOID = {"meta", "link", "input", "br"}
NASTY = "</script><script>alert(1)</script> \"quoted\" 'single' & <b> \u202e\ud800\x00 $x$ " + "long" * 80


class Page(HTMLParser):
    """The elements and texts of a page; every tag has to be closed in turn."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.texts, self.scripts, self._open = [], [], [], []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self._open and self._open[-1] in ("script", "style") else self.texts).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


class TestHtml:
    def test_it_says_everything(self, foreign):
        page = Page(render(foreign.all_kinds(), lengths=foreign.lengths, title="My plan"))
        text = page.text
        assert "My plan" in text
        for expected in (
            "Fits: 1.5 kB of 2 kB, 75 % of the budget.",
            "30 steps",  # 2 batches of text, 3 chunks of sample, 5 steps of time
            "At once, at most 96 elements",  # 2 * 4 * 4 * 1 * 3
            "chunked : 3 chunks of 4, 2 computed twice",
            "sequential : one after another",
            "vectorized : all at once",
            "deduplicated : 3 distinct + 1 padding, 3 copied",
            "padded on the host : to lengths 4, 8, 25 % padding",
            "25 % of the computed length is padding: 18 of data in 24.",
            "3 of 6 elements are distinct. 4 are computed, 25 % of them padding. 33.3 % of the elements need not",
            "3 programs compiled to find out",
        ):
            assert expected.replace(" : ", ": ") in text, expected
        for reason in ("ragged", "copies", "too many", "a carry", "few"):
            assert text.count(reason) == 2  # in the nest and in the table

    def test_the_nest_is_nested(self, foreign):
        source = render(foreign.all_kinds(), lengths=foreign.lengths, panels=["nest"])
        starts = [source.index(f'id="axis-{i}"') for i in range(5)]
        assert starts == sorted(starts)
        assert source.count('<ol class="nest">') == 5
        between = source[starts[0] : starts[-1]]
        assert "</ol>" not in between  # each opens inside the one before

    def test_it_needs_no_network(self, foreign):
        source = render(foreign.all_kinds(), lengths=foreign.lengths)
        page = Page(source)
        policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'")
        for tag, attributes in page.elements:
            for name in ("src", "href", "action", "poster", "data"):
                assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
        assert set(re.findall(r"https?://[^\s'\"<)]+", source)) <= {"http://www.w3.org/2000/svg"}
        assert "@import" not in source

    def test_every_control_and_picture_has_a_name(self, foreign):
        page = Page(render(foreign.all_kinds(), lengths=foreign.lengths))
        labelled = {a["for"] for tag, a in page.elements if tag == "label"}
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))
        for tag, attributes in page.elements:
            if tag == "input":
                assert attributes.get("aria-label") or attributes["id"] in labelled
            if attributes.get("role") == "img":
                assert attributes["aria-label"]
            if "aria-labelledby" in attributes:
                assert attributes["aria-labelledby"] in ids
        assert ("html", {"lang": "en"}) in page.elements
        assert [tag for tag, _ in page.elements].count("h1") == 1

    def test_an_infeasible_plan_is_drawn_with_what_is_over_in_red(self, foreign):
        plan = foreign.all_kinds(1_200)
        source = render(plan, lengths=foreign.lengths)
        assert '<p class="verdict over">Does not fit: 1.5 kB needed, 300 B over the budget of 1.2 kB.' in source
        assert '<i class="toomuch" style="left:80.000%;width:20.000%"></i>' in source  # 1,200 and 300 of 1,500
        assert '<i class="toomuch" hidden></i>' in render(foreign.all_kinds(), lengths=foreign.lengths)

    def test_the_bar_of_the_memory_adds_up(self, foreign):
        source = render(foreign.all_kinds(), lengths=foreign.lengths, panels=["memory"])
        bar = source[source.index('id="memory-total"') :].split("</div>")[0]
        widths = [float(w) for w in re.findall(r'class="fill[^"]*"[^>]*width:([\d.]+)%', bar)]
        assert widths == [20.0, 40.0, 15.0]  # 400, 4 * 200 and 3 * 100 of the 2,000 that may be used
        assert 'class="limit" style="left:100.000%"' in bar

    def test_shares_that_overlap_are_not_stacked(self, foreign):
        plan = foreign.plan(
            foreign.decision("a", 10, 10),
            foreign.decision("b", 20, 20),
            memory=foreign.memory(200, 300, {"a": 20, "b": 10}, fixed=-200),
        )
        source = render(plan, panels=["memory"])
        assert "the shares of the axes overlap" in source
        bar = source[source.index('id="memory-total"') :].split("</div>")[0]
        assert [float(w) for w in re.findall(r'class="fill[^"]*"[^>]*width:([\d.]+)%', bar)] == [66.667, 0, 0]

    def test_any_name_and_reason_stays_text(self, foreign):
        plan = foreign.plan(
            foreign.decision(NASTY, 4, 2, foreign.Bucket([4]), NASTY),
            foreign.decision("b" + NASTY, 4, 4, foreign.DedupGather([0, 1, 2, 3], 4, 4), NASTY),
            foreign.decision("c" + NASTY, 9, 4, foreign.SafeMap(4), NASTY),
            memory=foreign.memory(9, 3, {"c" + NASTY.replace("\ud800", "\ufffd").replace("\x00", "\ufffd"): 2}),
        )
        source = render(plan, title=NASTY)
        source.encode("utf-8")
        page = Page(source)
        assert [tag for tag, _ in page.elements].count("script") == 2
        assert not any(tag == "b" for tag, _ in page.elements)
        assert "alert(1)" in page.text
        raw = next(script for script in page.scripts if script.startswith('{"axes"'))
        assert "<" not in raw  # neither the end of a script nor the start of a comment
        data = json.loads(raw)
        assert data["axes"][2]["name"].startswith('c</script><script>alert(1)</script> "quoted"')

    def test_what_the_script_is_told(self, foreign):
        page = Page(render(foreign.all_kinds(), lengths=foreign.lengths))
        data = json.loads(next(s for s in page.scripts if s.startswith('{"axes"')))
        assert [axis["steps"] for axis in data["axes"]] == [2, 1, 3, 5, 1]
        assert data["axes"][0]["batches"] == [[4, 1, 2], [8, 1, 2]]
        assert data["memory"] == {"estimate": 1500, "budget": 2000, "slope_by_axis": {"sample": 200.0, "head": 100.0}}
        assert data["buckets"] == [{"lengths": [[1, 1], [4, 1], [5, 1], [8, 1]]}]

    def test_panels_are_those_that_the_plan_has_something_for(self, foreign):
        def panels(plan, **options):
            page = Page(render(plan, **options))
            return [a["id"] for tag, a in page.elements if tag == "section"]

        assert panels(foreign.all_kinds()) == ["nest", "memory", "buckets", "duplicates", "axes"]
        assert panels(foreign.plan(foreign.decision())) == ["nest", "axes"]
        assert panels(foreign.plan()) == ["nest", "axes"]
        assert panels(foreign.plan(), panels=("axes", "memory", "duplicates", "buckets")) == [
            "axes",
            "memory",
            "duplicates",
            "buckets",
        ]

    def test_a_plan_without_axes(self, foreign):
        text = Page(render(foreign.plan())).text
        assert "Plan of 0 axes" in text
        assert "the function is called as it is" in text

    def test_statistics_can_be_drawn_too(self, foreign):
        plan = foreign.all_kinds()
        assert render(explain_plan(plan, lengths=foreign.lengths)) == render(plan, lengths=foreign.lengths)
        with pytest.raises(ValueError, match="lengths cannot be added to statistics"):
            render(explain_plan(plan), lengths=foreign.lengths)

    @given(
        sizes=st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6)), max_size=6),
        budget=st.none() | st.integers(1, 10**12),
        estimate=st.integers(0, 10**12),
    )
    @settings(max_examples=30, deadline=None)
    def test_any_plan_makes_a_well_formed_page_and_figure(self, foreign, sizes, budget, estimate):
        decisions = [
            foreign.decision(f"a{i}", n, b, foreign.SafeMap(b) if n > b else foreign.Vmap())
            for i, (n, b) in enumerate(sizes)
        ]
        memory = foreign.memory(estimate, budget, {f"a{i}": 1.0 for i in range(len(sizes))})
        plan = foreign.plan(*decisions, memory=memory)
        for style in [a["style"] for _, a in Page(render(plan)).elements if "style" in a]:
            for value in re.findall(r"(?:left|top|width|height):([^;]+)%", style):
                assert -0.001 <= float(value) <= 100.001
        ET.fromstring(render(plan, "svg"))


class TestSvg:
    def test_it_is_one_file_with_a_title_and_a_description(self, foreign):
        source = render(foreign.all_kinds(1_200), "svg", lengths=foreign.lengths, title="My plan")
        root = ET.fromstring(source)
        space = "{http://www.w3.org/2000/svg}"
        assert root.get("role") == "img"
        assert root.findtext(f"{space}title") == "My plan"
        described = root.findtext(f"{space}desc") or ""
        assert described.startswith("Does not fit: 1.5 kB needed, 300 B over the budget of 1.2 kB.")
        assert "sample: 10 elements, 3 chunks of 4, 2 computed twice" in described
        texts = [element.text for element in root.iter(f"{space}text")]
        for expected in ("text", "ligand", "sample", "time", "head", "too many", "a carry", "1.5 kB, budget 1.2 kB"):
            assert expected in texts
        over = [r for r in root.iter(f"{space}rect") if r.get("class") == "over"]
        assert len(over) == 1
        assert float(over[0].attrib["width"]) == pytest.approx(0.2 * (900 - 2 * 28), abs=0.01)

    def test_everything_lies_inside(self, foreign):
        root = ET.fromstring(render(foreign.all_kinds(), "svg", lengths=foreign.lengths))
        height, width = float(root.attrib["height"]), float(root.attrib["width"])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            if rect.get("x"):
                x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
                assert 0 <= x <= x + w <= width + 0.01
                assert 0 <= y <= y + h <= height + 0.01

    def test_any_name_stays_text(self, foreign):
        plan = foreign.plan(foreign.decision(NASTY, 9, 4, foreign.SafeMap(4), NASTY))
        root = ET.fromstring(render(plan, "svg", title=NASTY))
        assert not any("script" in element.tag for element in root.iter())

    def test_many_axes_still_fit(self, foreign):
        plan = foreign.plan(*(foreign.decision(f"axis{i}", 2, 2) for i in range(40)))
        root = ET.fromstring(render(plan, "svg"))
        widths = [float(r.attrib["width"]) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
        assert min(widths) > 0


class TestPng:
    def test_its_size_is_that_of_the_figure(self, foreign):
        pytest.importorskip("matplotlib")
        plan = foreign.all_kinds()
        data = render(plan, "png", lengths=foreign.lengths)
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        svg = ET.fromstring(render(plan, "svg", lengths=foreign.lengths))
        assert width == 1350
        assert height == pytest.approx(1.5 * float(svg.attrib["height"]), abs=2)

    def test_what_is_over_is_red(self, foreign):
        image = pytest.importorskip("matplotlib.image")
        import io

        red = np.array(list(bytes.fromhex(LIGHT["over"][1:]))) / 255

        def reds(budget):
            pixels = image.imread(io.BytesIO(render(foreign.all_kinds(budget), "png", panels=["memory"])))
            return int((np.abs(pixels[..., :3] - red).max(-1) < 0.02).sum())

        # A fifth of a bar of 844 by 14 pixels, at one and a half times the size, and the verdict.
        assert reds(1_200) > 0.9 * (844 * 1.5 * 0.2) * (14 * 1.5)
        assert reds(2_000) == 0

    def test_dollars_are_not_mathematics(self, foreign):
        pytest.importorskip("matplotlib")
        assert render(foreign.plan(foreign.decision("$\\notacommand$", 2, 2)), "png").startswith(b"\x89PNG")

    @pytest.mark.parametrize("call", ["render(plan, 'png')", "plan_to_dataframe(plan)"])
    def test_without_the_extra_the_error_says_what_to_install(self, call):
        program = (
            "import sys\n"
            "sys.modules['matplotlib'] = sys.modules['pandas'] = None\n"
            "from xtrax.eda import render, plan_to_dataframe\n"
            "from xtrax.tiling import AxisSpec, BatchPlanner\n"
            "plan = BatchPlanner().plan([AxisSpec('batch', 8, 2)])\n"
            "assert render(plan) and render(plan, 'svg')\n"
            f"try:\n    {call}\nexcept ImportError as error:\n    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "install matplotlib and pandas, the extra viz of xtrax-eda" in done.stdout

    def test_importing_the_layer_imports_no_extra(self):
        program = "import sys, xtrax.eda; print([m for m in ('matplotlib', 'pandas') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.stdout == "[]\n", done.stderr


class TestFiles:
    @pytest.mark.parametrize("fmt", ["html", "svg"])
    def test_the_file_holds_what_is_returned(self, foreign, tmp_path, fmt):
        path = tmp_path / f"plan.{fmt}"
        document = render(foreign.plan(foreign.decision("größe")), fmt, path)
        assert path.read_text(encoding="utf-8") == document
        assert os.listdir(tmp_path) == [path.name]

    def test_an_old_file_is_replaced_and_a_link_stays_a_link(self, foreign, tmp_path):
        target = tmp_path / "target.html"
        target.write_text("old")
        link = tmp_path / "link.html"
        link.symlink_to(target)
        document = render(foreign.plan(), path=str(link))
        assert link.is_symlink()
        assert target.read_text(encoding="utf-8") == document

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, foreign, tmp_path, monkeypatch):
        path = tmp_path / "plan.html"
        path.write_text("old")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("pathlib.Path.replace", full)
        with pytest.raises(OSError, match="No space left"):
            render(foreign.plan(), path=path)
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["plan.html"]

    def test_a_device_is_written_to_and_not_replaced(self, foreign):
        render(foreign.plan(), path="/dev/null")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
    def test_a_read_only_folder(self, foreign, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            render(foreign.plan(), path=tmp_path / "plan.html")

    def test_a_folder_that_is_missing_or_a_path_that_is_one(self, foreign, tmp_path):
        with pytest.raises(FileNotFoundError, match="which is no folder; make it first"):
            render(foreign.plan(), path=tmp_path / "missing" / "plan.html")
        with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
            render(foreign.plan(), path=tmp_path)

    def test_the_logger_hears_of_warnings_and_files(self, foreign, tmp_path, caplog):
        logger = logging.getLogger("mine")
        with caplog.at_level(logging.INFO, logger="mine"):
            render(foreign.all_kinds(1_200), path=tmp_path / "plan.html", logger=logger)
        assert [(r.levelname, r.message) for r in caplog.records] == [
            (
                "WARNING",
                "Does not fit: 1.5 kB needed, 300 B over the budget of 1.2 kB. "
                "Lower a batch size, or raise the budget.",
            ),
            ("INFO", f"wrote {tmp_path / 'plan.html'}"),
        ]
        assert all(record.name == "mine" for record in caplog.records)

    def test_nothing_is_printed(self, foreign, capsys):
        render(foreign.plan(foreign.decision()))
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fmt": "pdf"}, ValueError, "fmt must be one of 'html', 'svg', 'png', but is 'pdf'"),
        ({"fmt": None}, TypeError, "fmt must be one of"),
        ({"fmt": "HTML"}, ValueError, "fmt"),
        ({"path": "plan.png"}, ValueError, "is that of a png file, but fmt is 'html'; pass fmt='png'"),
        ({"path": ""}, ValueError, "path is empty"),
        ({"path": 3}, TypeError, "path must be a string or a path"),
        ({"path": True}, TypeError, "path must be"),
        ({"path": b"plan.html"}, TypeError, "path must be"),
        ({"panels": []}, ValueError, "panels is empty"),
        ({"panels": "nest"}, TypeError, "put a single one into a list"),
        ({"panels": ["nest", "moon"]}, ValueError, r"panels\[1\] must be one of .* but is 'moon'"),
        ({"panels": ["nest", "nest"]}, ValueError, "panels names 'nest' twice"),
        ({"panels": [["nest"]]}, ValueError, r"panels\[0\]"),
        ({"panels": 3}, TypeError, "panels must be"),
        ({"logger": "log"}, TypeError, "logger must be"),
        ({"title": 3}, TypeError, "title must be"),
        ({"plan": None}, TypeError, "plan must have .decisions"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(foreign, tmp_path, monkeypatch, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    plan = arguments.pop("plan", foreign.plan())
    with pytest.raises(error, match=message):
        render(plan, **arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_legible_on_every_ground(palette):
    kinds = ("vectorized", "chunked", "sequential", "deduplicated", "padded", "other")
    grounds = [palette["ground"], palette["panel"], *(blend(palette[k], palette["panel"], TINT) for k in kinds)]
    for text, ground in product(("ink", "muted", "fits", "over", *kinds), grounds):
        assert contrast(palette[text], ground) >= 4.5, (text, ground)  # WCAG 2.2, level AA


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails


class TestFrame:
    def test_a_row_for_each_axis(self, foreign):
        pd = pytest.importorskip("pandas")
        plan = foreign.all_kinds()
        frame = plan_to_dataframe(plan)
        assert frame["name"].tolist() == ["text", "ligand", "sample", "time", "head"]
        assert frame["strategy"].tolist() == ["Bucket", "DedupGather", "SafeMap", "Scan", "Vmap"]
        assert frame["steps"].tolist() == [pd.NA, 1, 3, 5, 1]
        assert frame["memory_estimate_bytes"].tolist() == [pd.NA, pd.NA, 800, pd.NA, 300]
        assert frame["batch_size"].sum() == 14
        assert str(frame["steps"].dtype) == "Int64"
        pd.testing.assert_frame_equal(frame, plan_to_dataframe(explain_plan(plan)))

    def test_no_axes_and_huge_ones(self, foreign):
        pytest.importorskip("pandas")
        empty = plan_to_dataframe(BatchPlanner().plan([]))
        assert len(empty) == 0
        assert "memory_estimate_bytes" in empty.columns
        huge = plan_to_dataframe(foreign.plan(foreign.decision("all", 2**70, 2**70)))
        assert huge["cardinality"].tolist() == [2**70]

    def test_what_is_no_plan(self):
        pytest.importorskip("pandas")
        with pytest.raises(TypeError, match=r"plan must have \.decisions"):
            plan_to_dataframe([AxisSpec("a", 1, 1)])  # ty: ignore[invalid-argument-type]
