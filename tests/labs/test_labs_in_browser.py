"""Lessons as a student has them: opened in JupyterLab, run cell by cell with predictions, an exercise answered wrong
and then right, in both themes."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from browser import CELLS, NOTEBOOK, PREDICT, RUN_TIMEOUT, open_notebook, set_theme, sync_api
from conftest import PICTURES

from labkit.course.build.criteria import source_of
from labkit.course.exercises import LABS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TOPICS = {lab: topic for topic, lab in LABS.items()}
LESSONS = (
    *("00_start_here", "01_collectives", "03_ddp", "05_fsdp", "07_pipeline_parallel"),
    *("13_build_ddp_and_zero", "14_build_model_parallel"),
    *("15_mixture_of_experts", "16_long_context", "17_capstone", "18_one_device", "19_clusters", "20_profiles"),
    *("21_dtensor", "22_precision_and_memory", "23_without_restart", "24_batch_size", "25_inference_and_rl"),
)
# Of every cell: its source, its tags, and whether it is one that runs.
SHOWN = (
    f"{CELLS}.map(one => [one.model.sharedModel.getSource(), one.model.getMetadata('tags') ?? [], one.model.type ==="
    " 'code'])"
)
IDLE = f"number => {CELLS}[number].model.executionState !== 'running' && {CELLS}[number].model.executionCount !== null"


@pytest.mark.parametrize("lab", LESSONS)
def test_a_student_goes_through_a_lab(lab, page, jupyter):
    open_notebook(page, jupyter, f"labs/{lab}.py")
    cells = page.evaluate(SHOWN)
    codes = [number for number, (_, tags, runs) in enumerate(cells) if runs and "long" not in tags]
    assert len(codes) > 5
    for number in codes:
        run_cell(page, number)
    sync_api.expect(
        page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")
    ).to_have_count(0)
    sync_api.expect(
        page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']")
    ).to_have_count(0)
    for state in page.locator(".labkit:not(:has(.labkit-run)) .labkit-state").all():
        sync_api.expect(state).to_have_text(re.compile("finished|stopped|failed"), timeout=RUN_TIMEOUT)
    an_exercise_is_answered(page, lab, cells)
    for theme in ("Light", "Dark"):
        set_theme(page, theme)
        pictures_of(page, f"30-{lab}-{theme.lower()}")


def run_cell(page: sync_api.Page, number: int) -> None:
    """Puts the cursor into a cell, presses Shift + Enter, and waits until the cell is done. A prediction is 1."""
    page.evaluate(f"number => {{ {cell_of('number')}; {NOTEBOOK}.scrollToItem(number); }}", number)
    page.locator(".jp-Cell.jp-mod-active .cm-content").first.click()
    page.evaluate(PREDICT, number)
    page.keyboard.press("Shift+Enter")
    page.wait_for_function(IDLE, arg=number, timeout=3 * RUN_TIMEOUT)  # a cell may wait for several runs


def cell_of(number: str) -> str:
    """JavaScript that makes a cell the active one."""
    return f"{NOTEBOOK}.activeCellIndex = {number}"


def an_exercise_is_answered(page: sync_api.Page, lab: str, cells: list) -> None:
    """First a plausible wrong answer, whose verdict says what is wrong, then the right one; none that is drawn for the
    learner of the browser's runs folder."""
    topic = TOPICS[lab]
    answers = importlib.import_module(f"answers.{topic}")
    name = next(
        (
            name
            for name, answer in answers.RIGHT.items()
            if can_be_typed(answer) and can_be_typed(answers.WRONG[name][0])
        ),
        None,
    )
    if name is None:
        return
    number, source = next(
        (number, source) for number, (source, *_) in enumerate(cells) if f'check("{topic}.{name}"' in source
    )
    wrong, words = answers.WRONG[name]
    for answer, mark in ((wrong, "✗ not yet"), (answers.RIGHT[name], "✓ right")):
        page.evaluate(f"number => {{ {cell_of('number')}; {NOTEBOOK}.scrollToItem(number); }}", number)
        page.locator(".jp-Cell.jp-mod-active .cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(typed(source, answer))
        page.keyboard.press("Control+Enter")
        verdict = page.locator(".jp-Cell.jp-mod-active .labkit-verdict")
        sync_api.expect(verdict).to_contain_text(mark, timeout=RUN_TIMEOUT)
        if answer is wrong:
            sync_api.expect(verdict).to_contain_text(words)


def can_be_typed(answer: object) -> bool:
    """Whether an answer is a value or a function to be written, and not one that makes a run first."""
    return not callable(answer) or bool(inspect.signature(answer).parameters)


def typed(source: str, answer: object) -> str:
    """The cell of an exercise with its answer."""
    if not callable(answer):
        return source.replace("...", repr(answer), 1)
    asked = re.search(r'check\("[\w.]+", ', source)[0]
    return f"{source_of(answer)}\n\n{asked}{answer.__name__})"


def pictures_of(page: sync_api.Page, name: str) -> None:
    """The whole lesson in pictures for a person to look at, a tall page at a time."""
    page.set_viewport_size({"width": 1280, "height": 2400})
    notebook = page.locator(".jp-WindowedPanel-outer").first
    notebook.evaluate("element => element.scrollTo(0, 0)")
    for number in range(1, 30):
        page.wait_for_timeout(1200)
        page.screenshot(path=PICTURES / f"{name}-{number}.png")
        before = notebook.evaluate("element => element.scrollTop")
        notebook.evaluate("element => element.scrollBy(0, 2200)")
        page.wait_for_timeout(200)
        if notebook.evaluate("element => element.scrollTop") <= before:
            break
    page.set_viewport_size({"width": 1280, "height": 720})
