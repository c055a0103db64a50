"""The class in JupyterLab and as a page, in a real browser: live, without names, light and dark."""

from __future__ import annotations

import random
import stat
import time

import pytest
from accessible import violations
from browser import HEADER, command, open_notebook, picture, set_theme, sync_api
from classes import hand_in, run_of, tried
from conftest import PICTURES

from labkit.course.classroom.learners import known_exercises
from labkit.course.classroom.overview import Class
from labkit.frontends.handout import class_page

pytestmark = pytest.mark.browser
FIRST = ("Amara", "Bela", "Chidi", "Dalia", "Eskil", "Farah", "Goran", "Hana", "Ivo", "Jun")
LAST = ("Adler", "Brook")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twenty learners, of whom three have just failed and one has handed in a damaged zip."""
    place, chance = tmp_path / "autumn", random.Random(1)
    names = list(known_exercises())
    for number, learner in enumerate(f"{first} {last}" for last in LAST for first in FIRST):
        runs = place / learner
        done = {name.replace(".", "__"): (chance.randint(1, 5), chance.random() < 0.7) for name in names[: 3 + number]}
        tried(runs, **done)
        run_of(runs, guess={"step_ms": 50 * (0.2, 0.6, 1.02, 0.97, 1.4, 2.5)[number % 6], "peak_mb": 40.0})
        if number % 7 == 3:
            error = "CUDA out of memory. Tried to allocate 2.00 GiB" if number == 3 else f"/home/{learner}/train.py"
            run_of(runs, "failed", time.time() - 8 * number, f"ValueError: {error}")
    (place / "Zoe Crane.zip").write_bytes(b"PK nothing")
    hand_in(place / "Ivo Brook", place / "Yara Crane.zip", monkeypatch)
    return place


def test_a_teacher_sees_the_class_and_hides_names(page, jupyter, folder):
    cell = f"from labkit import classroom\nclassroom({str(folder)!r}, every=1)\n"
    (jupyter.work / "class.py").write_text(HEADER + cell)
    open_notebook(page, jupyter, "class.py")
    command(page, "application:toggle-left-area")  # as on a projector
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-class"))
    sync_api.expect(panel.locator(".learners tbody tr")).to_have_count(22)
    sync_api.expect(panel.locator(".hands li")).to_have_count(3)
    panel.evaluate("element => element.scrollIntoView({block: 'start'})")
    for theme in ("Dark", "Light"):
        set_theme(page, theme)
        picture(page, f"90-class-{theme.lower()}")
        panel.screenshot(path=PICTURES / f"90-class-whole-{theme.lower()}.png")
        assert violations(page, ".labkit-class") == []
    run_of(folder / "Dalia Adler")
    sync_api.expect(panel.locator(".hands li")).to_have_count(2)
    panel.get_by_role("button", name="Hide names").click()
    sync_api.expect(panel.locator(".learners tbody tr").first).to_contain_text("learner ")
    html = panel.evaluate("element => element.outerHTML")
    assert not [name for name in (*FIRST, *LAST, "Crane", "autumn") if name in html]
    picture(page, "91-class-without-names")
    panel.get_by_role("button", name="Hide names").click()
    sync_api.expect(panel.locator(".learners")).to_contain_text("Amara Adler")


def test_a_teacher_uploads_zips(page, jupyter, tmp_path, monkeypatch):
    place, sent = tmp_path / "winter", tmp_path / "sent"
    place.mkdir()
    sent.mkdir()
    tried(tmp_path / "runs", ddp__steps=(2, True))
    hand_in(tmp_path / "runs", sent / "Ada <b>Quill.zip", monkeypatch)
    (sent / "Ada Quill.zip").write_bytes((sent / "Ada <b>Quill.zip").read_bytes())
    (sent / "essay.zip").write_bytes(b"PK nothing")
    (jupyter.work / "winter.py").write_text(HEADER + f"from labkit import classroom\nclassroom({str(place)!r})\n")
    open_notebook(page, jupyter, "winter.py")
    command(page, "notebook:run-all-cells")
    panel = page.locator(".labkit", has=page.locator(".labkit-class"))
    sync_api.expect(panel).to_contain_text("No learner is here yet")
    with page.expect_file_chooser() as chosen:
        panel.get_by_role("button", name="Add zips").click()
    chosen.value.set_files(sorted(sent.iterdir()))
    sync_api.expect(panel.locator(".learners tbody tr")).to_have_count(1)
    sync_api.expect(panel.locator(".learners tbody tr")).to_contain_text("Ada Quill")
    sync_api.expect(panel).to_contain_text("1 zip added")
    sync_api.expect(panel.locator(".labkit-finding")).to_contain_text(
        ["Ada <b>Quill.zip: its name is not that of a learner", "essay.zip: the zip is damaged"]
    )
    for theme in ("Dark", "Light"):
        set_theme(page, theme)
        panel.screenshot(path=PICTURES / f"93-class-upload-{theme.lower()}.png")
        assert violations(page, ".labkit") == []
    panel.get_by_role("button", name="Hide names").click()
    sync_api.expect(panel).not_to_contain_text("Quill")
    (path,) = place.iterdir()
    assert path.name == "Ada Quill.zip" and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_class_works_offline(chromium, folder, tmp_path, scheme):
    path = class_page(Class(folder).read()).write(tmp_path / "class.html")
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, offline=True, color_scheme=scheme)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    assert page.locator(".learners tbody tr").count() == 22
    page.screenshot(path=PICTURES / f"92-class-page-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert violations(page) == []
    context.close()
    assert not said
