"""The page in a real browser: chromium by the W3C WebDriver protocol (packages chromium and chromium-driver)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvcli.demo import sample_path

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DRIVER and CHROMIUM), reason="needs chromium and chromedriver"),
]
PATIENCE = 90.0  # seconds for anything
KEY = "a-key-of-enough-letters"
ENTER = "\ue007"


def first_line(*command: str, **more: Any) -> tuple[subprocess.Popen[str], Callable[[], str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
    assert process.stdout is not None
    return process, process.stdout.readline


@contextmanager
def serve(home: Path, *options: str) -> Iterator[str]:
    """A server on the demo model; yields its address."""
    environment = {**os.environ, "KVCLI_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "kvcli", "serve", "demo", "--port", "0", "--profile", "exact", *options]
    process, line = first_line(*command, env=environment)
    try:
        yield line().split()[0].removesuffix("/v1")
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("home")) as found:
        yield found


class Browser:
    """A session of chromium."""

    def __init__(self, width: int = 1200, *, dark: bool = False) -> None:
        assert DRIVER
        self.process, line = first_line(DRIVER, "--port=0")
        while "successfully on port " not in (said := line()):
            pass
        self.url = f"http://127.0.0.1:{said.rpartition('on port ')[2].strip().rstrip('.')}"
        flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},800"]
        options = {"binary": CHROMIUM, "args": [*flags, *(["--force-dark-mode"] if dark else [])]}
        asks = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.url += f"/session/{self('/session', capabilities={'alwaysMatch': asks})['sessionId']}"
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)

    def __call__(self, path: str, **body: Any) -> Any:
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)["value"]

    def tell(self, command: str, **params: Any) -> Any:
        return self("/goog/cdp/execute", cmd=command, params=params)

    def open(self, url: str) -> None:
        self("/url", url=url)

    def run(self, script: str, *given: Any) -> Any:
        """Run a script in the page, and return what it returns or promises."""
        return self("/execute/sync", script=script, args=[*given])

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def wait(self, script: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < end, (script, self.text("body"))
            time.sleep(0.05)
        return found

    def type(self, css: str, text: str) -> None:
        element = self("/element", using="css selector", value=css)
        self(f"/element/{next(iter(element.values()))}/value", text=text)

    def ask(self, text: str) -> None:
        before = self.run("return document.querySelectorAll('#log > section').length")
        self.type("#question", text + ENTER)
        self.wait(f"document.querySelectorAll('#log > section').length > {before} && {IS_DONE}")

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self("/se/log", type="browser") if entry["level"] == "SEVERE"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # ends chromium, which outlives its driver
            urllib.request.urlopen(urllib.request.Request(self.url, method="DELETE"), timeout=PATIENCE).close()
        self.process.terminate()
        self.process.wait(PATIENCE)


ANSWER = "article > .text"
IS_DONE = "document.querySelector('#stop').hidden"


@pytest.fixture
def browser(address: str) -> Iterator[Browser]:
    with Browser() as made:
        made.open(address)
        made.wait("document.querySelectorAll('[name=model] option').length")
        yield made


DROP = """
const [data, name] = arguments, held = new DataTransfer();
held.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name));
const how = { dataTransfer: held, bubbles: true, cancelable: true };
document.querySelector("main").dispatchEvent(new DragEvent("drop", how));
"""


def drop(browser: Browser, data: bytes, name: str) -> None:
    browser.run(DROP, base64.b64encode(data).decode(), name)
    browser.wait("document.querySelector('#attached li')")


def test_an_answer_has_its_figures_and_survives_a_reload(browser: Browser):
    browser.ask("Who are you?")
    answer = browser.text("article > .text")
    assert answer
    figures = browser.text("article .figures")
    assert all(word in figures for word in ("tok/s", "prompt tokens cached", "KV cache"))
    assert browser.text("#status") == "The answer is complete."
    browser("/refresh")
    browser.wait("document.querySelector('article > .text')")
    assert browser.text("article > .text") == answer
    browser.ask("Thank you.")
    assert browser.complaints() == []


STOP_AT_ONCE = """
const hasText = () => document.querySelector("article > .text")?.innerText;
const watcher = new MutationObserver(() => hasText() && document.querySelector("#stop").click());
watcher.observe(document.querySelector("#log"), { childList: true, subtree: true });
"""


def test_stop_keeps_what_was_written(browser: Browser):
    browser.run(
        "document.querySelector('[name=temperature]').value = 2; document.querySelector('[name=seed]').value = 3"
    )
    browser.run(STOP_AT_ONCE)
    browser.ask("Tell me everything that you know.")
    assert browser.text("article > .text")
    assert browser.text("article .figures").endswith("stopped")


def test_stop_while_a_document_is_read_gives_the_question_back(browser: Browser):
    drop(browser, sample_path().read_bytes(), "a.pdf")
    browser.type("#question", "What is new?" + ENTER)
    assert browser.text("#status") == "The answer is being written."
    browser.run("document.querySelector('#stop').click()")
    browser.wait(IS_DONE)
    assert browser.run("return document.querySelector('#question').value") == "What is new?"
    assert browser.text("#status") == ""
    assert "a.pdf" in browser.text("#attached")
    assert browser.text("#log") == ""


def test_a_citation_opens_the_sentence_of_a_dropped_pdf(browser: Browser):
    drop(browser, sample_path().read_bytes(), "a.pdf")
    browser.ask("What is the main finding of section 2?")
    assert browser.text(".cite") == "[p. 3]"
    browser.run("document.querySelector('.cite').click()")
    browser.wait("document.querySelector('#section mark')")
    assert browser.text("#place") == "a.pdf, p. 3"
    assert browser.text("mark").startswith("Main finding of section 2:")
    assert browser.run("return document.activeElement.id") == "place"
    browser.run("document.querySelector('#on').click()")
    assert browser.text("#place") == "a.pdf, p. 4"
    browser.run("document.querySelector('#close').click()")
    assert browser.run("return document.activeElement.className") == "cite"
    assert browser.complaints() == []


FORGETS = """
const real = fetch, gone = { error: { code: "no_such_document", message: "gone" } };
window.fetch = async (path, how) => {
  if (path !== "/v1/chat/completions" || window.isAsked) return real(path, how);
  window.isAsked = true;
  return Response.json(gone, { status: 404 });
};
"""


def test_a_document_that_the_server_forgot_is_sent_again(browser: Browser):
    drop(browser, b"The depot holds oil.", "a.txt")
    browser.run(FORGETS)
    browser.type("#question", "What does the depot hold?" + ENTER)
    browser.wait(f"window.isAsked && document.querySelector('{ANSWER}')?.innerText && {IS_DONE}")
    assert browser.text("#alert") == browser.text("#attached") == ""
    browser.run("[...document.querySelectorAll('.row button')].find((one) => one.innerText === 'Ask again').click()")
    browser.wait(IS_DONE)
    assert browser.run("return document.querySelectorAll('#log > section').length") == 1
    browser.run("[...document.querySelectorAll('.row button')].find((one) => one.innerText === 'Edit').click()")
    assert browser.run("return document.querySelector('#question').value") == "What does the depot hold?"
    assert "a.txt" in browser.text("#attached")


def test_another_profile_writes_beside_and_equal_text_is_marked(browser: Browser):
    browser.run("document.querySelector('[name=beside]').value = 'demo:ngram'")
    browser.ask("Who are you?")
    assert browser.text(".equal") == "Both answers have the same text."
    assert browser.run("return [...document.querySelectorAll('article h2')].map((one) => one.innerText)") == [
        "demo:exact",
        "demo:ngram",
    ]
    marked = browser.run("return [...CSS.highlights.get('equal')].map(String)")
    assert marked == [browser.text("article > .text")] * 2


def test_words_of_others_are_no_markup(browser: Browser):
    drop(browser, b"<img src=x onerror=alert(1)> oil", "<img src=x onerror=alert(1)>.txt")
    browser.ask("<b>Who</b> are you?")
    assert browser.run("return document.querySelectorAll('img, b').length") == 0
    assert "<b>Who</b>" in browser.text(".question")
    assert browser.complaints() == []


def test_an_error_tells_what_to_do_and_keeps_the_question(browser: Browser):
    browser.run("document.querySelector('[name=tools]').value = '[1]'")
    browser.type("#question", "What?" + ENTER)
    browser.wait(f"{IS_DONE} && document.querySelector('#alert').innerText")
    assert browser.text("#alert").startswith("error: ")
    assert browser.run("return document.querySelector('#question').value") == "What?"


@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_its_window_and_names_its_fields(address: str, width: int, dark: bool):
    with Browser(width, dark=dark) as browser:
        browser.open(address)
        browser.wait("document.querySelectorAll('[name=model] option').length")
        browser.run("document.querySelector('details').open = true")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        back = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
        fields = "[...document.querySelectorAll('button, input, select, textarea')]"
        unnamed = (
            f"{fields}.filter((one) => !(one.innerText || one.ariaLabel || one.labels?.length || one.hidden)).length"
        )
        assert browser.run(f"return {unnamed}") == 0


FOREIGN = """<!doctype html><iframe src="ADDRESS"></iframe><script>
const asked = { method: "POST", mode: "no-cors", body: '{"messages": [{"role": "user", "content": "?"}]}' };
const read = (path, how) => fetch("ADDRESS" + path, how).then((one) => one.type, () => "refused");
const all = [read("/v1/models"), read("/v1/chat/completions", asked), read("/health", { mode: "no-cors" })];
window.found = Promise.all(all);
</script><script src="ADDRESS/page.js" onerror="window.isRefused = true"></script>"""


class Foreign(BaseHTTPRequestHandler):
    """A page of another origin on this machine."""

    def __init__(self, address: str, *given: Any) -> None:
        self.address = address
        super().__init__(*given)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(FOREIGN.replace("ADDRESS", self.address).encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_a_foreign_page_is_refused(address: str):
    server = HTTPServer(("127.0.0.1", 0), partial(Foreign, address))
    Thread(target=server.serve_forever, daemon=True).start()
    before = urllib.request.urlopen(f"{address}/metrics").read().decode()
    with Browser() as browser:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait("window.isRefused")
        assert browser.run("return window.found")[0] == "refused"
        after = urllib.request.urlopen(f"{address}/metrics").read().decode()
        served = [
            [line for line in text.splitlines() if '"200"' in line and "metrics" not in line]
            for text in (before, after)
        ]
        assert served[0] == served[1]  # nothing that the page asked for was done
        assert browser.run("return frames.length === 1 && document.querySelector('iframe').contentDocument") is None
    server.shutdown()


def test_a_key_is_asked_for_and_kept_for_the_tab(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    with serve(tmp_path, "--key-file", str(file)) as address, Browser() as browser:
        browser.open(address)
        browser.wait("document.querySelector('dialog').open")
        browser.type("#key", "wrong" + ENTER)
        browser.wait("document.querySelector('dialog').open && !document.querySelector('#key').value")
        browser.type("#key", KEY + ENTER)
        browser.wait("document.querySelectorAll('[name=model] option').length")
        browser.ask("Who are you?")
        assert browser.text("article > .text")
