"""What a researcher sees: notebooks in JupyterLab, in a real browser.

Needs Chromium (Debian: `chromium`); `make browser` installs it. Without it the tests are skipped, unless RAR_REQUIRE_BROWSER is set. Screenshots lie
in tests/browser/screenshots, which git ignores.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOTS = Path(__file__).parent / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    if os.environ.get("RAR_REQUIRE_BROWSER"):
        pytest.fail("RAR_REQUIRE_BROWSER is set and there is no Chromium", pytrace=False)
    pytest.skip("no Chromium on this machine", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    folder: Path


@dataclass
class Seen:
    """An open page and what went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on 127.0.0.1 over a copy of the notebooks, with settings of its own."""
    folder = tmp_path_factory.mktemp("lab")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder)
    settings = tmp_path_factory.mktemp("settings")
    tracker = settings / "@jupyterlab" / "notebook-extension"
    tracker.mkdir(parents=True)
    # Every cell stays in the page, so that what is out of sight can be looked at.
    (tracker / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = settings / "@jupyterlab" / "apputils-extension"
    quiet.mkdir()
    (quiet / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    token = secrets.token_hex(16)
    environment = {
        **os.environ,
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path_factory.mktemp("workspaces")),
        "JUPYTER_TOKEN": token,
        "JUPYTER_PLATFORM_DIRS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]  # fmt: skip
    log = (folder / "lab.log").open("w")
    with subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(240):
                assert server.poll() is None, (folder / "lab.log").read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"{url}/api?token={token}", timeout=2).close()
                    break
                except OSError:
                    time.sleep(0.25)
            yield Lab(url, token, folder)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    log.close()


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A page of a headless Chromium."""
    SHOTS.mkdir(exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        found = Seen(page)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.set_default_timeout(180_000)  # a kernel that imports torch on busy cores
        try:
            yield found
        finally:
            page.screenshot(path=SHOTS / "last.png")
            browser.close()


def open_notebook(lab: Lab, page: Any, name: str) -> None:
    page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell .cm-content")
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')


def set_parameters(page: Any, **values: str) -> None:
    """As a person does it: click into the parameters cell, and write other values."""
    editor = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    text = editor.inner_text()
    for name, value in values.items():
        text, count = re.subn(rf"(?m)^({name}: \w+ = ).*$", lambda m, value=value: m[1] + value, text)
        assert count == 1, name
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text.strip())
    assert editor.inner_text().strip() == text.strip()


def run_all(page: Any) -> None:
    """From the menu; again where the kernel was not ready to hear it."""
    for _ in range(3):
        page.get_by_role("menubar").get_by_text("Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt").first.inner_text().strip() not in (
                "[ ]:",
                "",
            ):
                return
            time.sleep(0.2)
    raise AssertionError("no cell began to run")


def finished(page: Any) -> bool:
    """Every code cell has a number, and none is running."""
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt").all_inner_texts()
    return bool(prompts) and all(re.fullmatch(r"\[\d+\]:", p.strip()) for p in prompts)


def test_the_quickstart_runs_in_jupyterlab(lab: Lab, seen: Seen, tmp_path: Path) -> None:
    page = seen.page
    open_notebook(lab, page, "01_quickstart.ipynb")
    page.screenshot(path=SHOTS / "01_opened.png")
    page.get_by_role("menubar").get_by_text("Edit", exact=True).click()
    page.get_by_text("Clear Outputs of All Cells", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.jp-OutputArea-output img').length === 0")
    set_parameters(
        page,
        steps="6",
        native_steps="2",
        prompts_per_step="16",
        runs_dir=f'"{tmp_path}"',
        out_dir=f'"{tmp_path / "out"}"',
    )
    run_all(page)
    widths, shot, end = [], False, time.monotonic() + 400
    while time.monotonic() < end and not finished(page):
        bar = page.locator(".jp-OutputArea .widget-hbox", has_text="none-seed0-").locator(".progress-bar").first
        if bar.count():
            width = bar.evaluate("e => e.style.width")
            if not widths or widths[-1] != width:
                widths.append(width)
            if len(widths) == 4 and not shot:
                bar.scroll_into_view_if_needed()
                page.screenshot(path=SHOTS / "01_running.png")
                shot = True
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
        time.sleep(0.1)
    assert finished(page), page.locator(".jp-InputArea-prompt").all_inner_texts()
    parts = [float(w.rstrip("%") or 0) for w in widths]
    assert len(parts) >= 4, widths
    assert parts == sorted(parts), widths
    assert parts[-1] == 100
    assert page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    figures = page.locator(".jp-OutputArea-output img")
    assert figures.count() == 3
    assert all(figure.evaluate("e => e.naturalWidth") > 300 for figure in figures.all())
    tables = page.locator(".jp-OutputArea-output table")
    assert tables.count() == 2
    assert tables.last.locator("tbody tr").count() == 3
    for number in range(3):
        figures.nth(number).scroll_into_view_if_needed()
        page.screenshot(path=SHOTS / f"01_figure_{number}.png")
    tables.last.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "01_tables.png")
    assert seen.errors == []
    assert (tmp_path / "out" / "policies.csv").exists()


EXPLORER = """\
from pathlib import Path
from rar_lib.checkpoint import DATA_DIR, load_tokenizer, resolve_checkpoint
from rar_lib.figures import explorer
from rar_lib.runs import tables
from rar_lib.runs.result import RunResult
run = RunResult.read(next((DATA_DIR / "reference").glob("R3-*")))
step, rollout, trainer = tables.traces(run)
explorer(rollout, trainer, decode=load_tokenizer(resolve_checkpoint("tiny-moe")).decode)
"""


def test_the_explorer_is_driven_by_its_sliders(lab: Lab, seen: Seen) -> None:
    new = nbformat.v4
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(
        new.new_notebook(cells=[new.new_code_cell(EXPLORER)], metadata=kernel), lab.folder / "explorer.ipynb"
    )
    page = seen.page
    open_notebook(lab, page, "explorer.ipynb")
    run_all(page)
    shown = page.locator(".jp-OutputArea .widget-html-content")
    shown.wait_for()
    sliders = page.locator(".jp-OutputArea [role=slider]")
    assert sliders.count() == 2

    def state() -> tuple[str, list[str]]:
        tokens = shown.locator("div span").all_inner_texts()
        marked = shown.locator("div span").evaluate_all("es => es.map(e => e.style.borderWidth === '2px')")
        return "".join(tokens), [i for i, here in enumerate(marked) if here]  # type: ignore[return-value]

    text, place = state()
    assert place == [0]
    assert shown.locator("tr").count() == 1 + 4
    page.screenshot(path=SHOTS / "explorer_first.png")
    routes = shown.locator("table").inner_text()
    sliders.nth(1).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "[...document.querySelectorAll('.widget-html-content div span')].findIndex(e => e.style.borderWidth === '2px') === 3"
    )
    assert state()[0] == text
    assert shown.locator("table").inner_text() != routes
    page.screenshot(path=SHOTS / "explorer_fourth_token.png")
    sliders.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "t => [...document.querySelectorAll('.widget-html-content div span')].map(e => e.innerText).join('') !== t",
        arg=text,
    )
    page.screenshot(path=SHOTS / "explorer_next_answer.png")
    assert seen.errors == []
