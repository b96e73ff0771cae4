"""The page of the server: its files, and a walk through it in a headless Chromium."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.app import PAGE

from ..browser import Browser
from ..media_model import MM, WIDE, write_folder
from .conftest import KEY, process

FILES = sorted(p.name for p in PAGE.iterdir())
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CODE = '<figure class="code"><pre tabindex="0"><code>', "</code></pre></figure>"
# sampling that does not end by itself before the test has looked
SETTINGS = {"sampling": {"seed": 7, "ignore_eos": True, "n_predict": 400}}


def test_files_have_types_and_a_strict_policy(client: TestClient) -> None:
    assert {Path(name).suffix for name in FILES} == set(TYPES)
    assert client.get("/").content == (PAGE / "index.html").read_bytes()
    for name in FILES:
        got = client.get(f"/{name}")
        assert (got.status_code, got.content) == (200, (PAGE / name).read_bytes())
        assert got.headers["content-type"] == TYPES[Path(name).suffix]
        policy = dict(part.split(" ", 1) for part in got.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy.pop("img-src") == "'self' data:" and set(policy.values()) == {"'self'", "'none'"}
        assert got.headers["cache-control"] == "no-cache" and got.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/{name}", headers={"if-none-match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == got.headers["content-security-policy"]


def test_files_need_nothing_from_elsewhere() -> None:
    """No address of another server, no HTML made of text, nothing that the policy refuses. What is named is there."""
    for name in FILES:
        text = (PAGE / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w|@import|url\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert not re.search(r"""\sstyle=|\son\w+=["']|<style|<script>""", text), name
        for named in re.findall(r"""(?:from|src=|href=|import\()\s*["'](?:\./)?([\w.]+\.\w+)["']""", text):
            assert named in FILES, f"{name} names {named}"
    icons = set(re.findall(r'id="(\w+)"', (PAGE / "icons.svg").read_text("utf-8")))
    all_text = "".join((PAGE / name).read_text("utf-8") for name in FILES if name.endswith((".js", ".html")))
    used = set(re.findall(r'(?:data-icon=|icon\(|iconButton\()"(\w+)"', all_text))
    assert used <= icons, used - icons


def test_a_folder_in_the_place_of_the_page(tales: gg.Model, tmp_path: Path) -> None:
    """It may do what it likes; only its types and its freshness are seen to."""
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "a.js").write_text("1")
    app = create_app(tales, ServeOptions(path=str(tmp_path), n_ctx=64, n_parallel=1, api_prefix="/here"))
    with TestClient(app) as c:
        got = c.get("/here/")
        assert got.text == "mine" and "content-security-policy" not in got.headers
        assert c.get("/here/a.js").headers["content-type"] == TYPES[".js"] and c.get("/a.js").status_code == 404


def test_props_say_whether_there_is_a_template(client: TestClient, tales: gg.Model) -> None:
    assert client.get("/props").json()["has_chat_template"] is False
    with TestClient(create_app(tales, ServeOptions(chat_template="llama3", n_ctx=64, n_parallel=1))) as c:
        assert c.get("/props").json()["has_chat_template"] is True


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"), 1280, 800)
    try:
        yield found
    finally:
        found.close()


READY = "document.body?.classList.contains('ready')"
IDLE = "document.querySelector('#stop').hidden"
ANSWER = "[...document.querySelectorAll('[data-id].assistant .body')].at(-1)?.innerText ?? ''"
# stops the answer as soon as a part of it is there
STOPPED = f"""new Promise((done) => {{
  const timer = setInterval(() => {{
    const text = {ANSWER};
    if (text.length < 12) return;
    clearInterval(timer);
    const shown = !document.querySelector("#stop").hidden;
    document.querySelector("#stop").click();
    done([text, shown]);
  }}, 4);
}})"""


def press(b: Browser, selector: str) -> None:
    b.until(f"document.querySelector({json.dumps(selector)}) !== null")
    b.js(f"document.querySelector({json.dumps(selector)}).click()")


def shown(b: Browser, selector: str) -> list[str]:
    return b.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText.trim())")


def test_a_walk_through_the_page(browser: Browser, served: tuple[str, subprocess.Popen[bytes]]) -> None:
    b, url = browser, served[0] + "/"
    b.visit(url, READY)
    b.js(f"localStorage.setItem('pyggml.settings', JSON.stringify({json.dumps(SETTINGS)}))")
    b.visit(url + "?", f"{READY} && document.querySelector('#key').open")  # the server wants a key
    assert shown(b, "#offline-text") == ["Invalid API Key"]
    b.js("document.querySelector('#key-text').focus()")
    b.type(KEY)
    press(b, "#key button")
    b.until("document.querySelector('#mode-text').getAttribute('aria-pressed') == 'true'")  # a model without template
    assert shown(b, "#model-name") == ["tales"] and shown(b, "#offline:not([hidden])") == []

    # a chat: send, see it stream, stop
    press(b, "#mode-chat")
    b.js("document.querySelector('#say').focus()")
    b.type("Hello")
    b.key("Enter")
    text, was_running = b.js(STOPPED)
    b.until(IDLE)
    assert was_running and shown(b, ".message.user .body") == ["Hello"]
    assert shown(b, ".message.assistant .body")[0].startswith(text.strip()[:12])
    assert b.js("document.querySelectorAll('.message.assistant .t').length") > 1
    assert "stopped" in shown(b, ".message.assistant .meta")[0]

    # another answer, and back
    first = shown(b, ".message.assistant .body")
    press(b, '[aria-label="Another answer"]')
    b.js(STOPPED)
    b.until(IDLE)
    assert shown(b, ".assistant .switcher") == ["2/2"]
    press(b, '.assistant [aria-label="Answer before"]')
    assert shown(b, ".assistant .switcher") == ["1/2"] and shown(b, ".message.assistant .body") == first

    # edit the question: a branch with its own answer
    press(b, '.user [aria-label="Edit"]')
    b.until("document.activeElement.matches('form.edit textarea')")
    b.js("document.activeElement.select()")
    b.type("Good evening")
    b.key("Enter")
    b.js(STOPPED)
    b.until(IDLE)
    assert shown(b, ".message.user .body") == ["Good evening"] and shown(b, ".user .switcher") == ["2/2"]
    press(b, '.user [aria-label="Message before"]')
    assert shown(b, ".message.user .body") == ["Hello"] and shown(b, ".message.assistant .body") == first

    # the alternatives of a token; another one begins a branch
    before = shown(b, ".assistant .body")[0]
    b.js("document.querySelectorAll('.assistant .t')[1].click()")
    assert b.js(
        "!document.querySelector('#probe').hidden && document.querySelector('#probe').contains(document.activeElement)"
    )
    # ... how it came about: attention, and what the layers would say; the last says what the alternatives say
    likeliest = shown(b, "#probe .alternative code")[0]
    press(b, "#probe .look")
    b.until("document.activeElement.id == 'inside-layer'")
    layers = int(b.js("document.activeElement.max"))
    assert len(shown(b, ".lens button")) == layers + 1
    assert shown(b, ".lens button:last-child code") == [likeliest]
    looks = shown(b, "#probe .most")
    press(b, ".lens button:first-child")
    assert b.js("document.querySelector('#inside-layer').value") == "0" and shown(b, "#probe .most") != looks
    assert shown(b, '.lens [aria-pressed="true"]') == shown(b, ".lens button")[:1]
    press(b, "#probe .look")  # back
    other = b.js("document.querySelector('#probe button:not([aria-current]):enabled code').innerText")
    press(b, "#probe button:not([aria-current]):enabled")
    b.until(f"!{IDLE}")
    b.key("Escape")  # stops
    b.until(IDLE)
    assert shown(b, ".assistant .switcher") == ["3/3"] and shown(b, ".assistant .body")[0] != before
    keys = [k for k in b.js("Object.keys(localStorage)") if "conversation" in k]
    kept = json.loads(b.js(f"localStorage[{json.dumps(keys[0])}]"))
    tokens = list(kept["nodes"].values())[-1]["tokens"]
    assert tokens[1][0].strip() == other.replace("␣", " ").replace("⏎", "\n").strip()

    # an error of the server, as it says it
    press(b, "#open-panel")
    b.js("document.querySelector('#s-temperature').focus()")
    b.type("-1")
    b.js("document.querySelector('#say').focus()")
    b.type("More")
    b.key("Enter")
    b.until("document.querySelector('.error') !== null")
    assert shown(b, ".error") == ["temp must be 0 or more, not -1.0"]
    press(b, "#sampling .link")

    # dark and light; all of it is there after a reload
    theme = b.js("document.documentElement.dataset.theme")
    press(b, "#theme")
    assert {theme, b.js("document.documentElement.dataset.theme")} == {"dark", "light"}
    kept = shown(b, ".message .body")
    b.visit(url, f"{READY} && performance.now() < 1e5 && document.querySelector('.message') !== null")
    assert shown(b, ".message .body") == kept
    assert b.js("document.documentElement.dataset.theme") != theme
    assert shown(b, "#conversations .open") == ["Hello"]

    # a text, continued
    press(b, "#mode-text")
    press(b, ".opening")
    b.until(f"{IDLE} && document.querySelector('.piece.assistant') !== null")
    assert shown(b, ".piece.user .body") == ["Once upon a time"] and len(shown(b, ".piece.assistant .body")[0]) > 50
    b.until("document.querySelectorAll('#slot-list li').length == 4")
    press(b, '#conversations li.on [aria-label^="Delete"]')
    press(b, '#delete button[value="delete"]')
    b.until("document.querySelectorAll('#conversations li').length == 1")
    assert b.errors == []


FILE = """(async () => {
  const bytes = Uint8Array.from(atob(%s), (c) => c.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], "a.png", { type: "image/png" }));
  files.items.add(new File(["no picture"], "b.png", { type: "image/png" }));
  const field = document.querySelector("#picture-file");
  field.files = files.files;
  field.dispatchEvent(new Event("change"));
})()"""


@pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
def test_a_picture_and_where_attention_looked_on_it(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    b = browser
    options = ("-m", write_folder(tmp_path / "m"), "-c", 512, "-np", 1, "-n", 12, "--ignore-eos", "--temp", 0)
    with process(*options) as (url, _):
        b.visit(url + "/", READY)
        b.js("localStorage.clear()")
        b.visit(url + "/?", READY)
        b.js(FILE % json.dumps(base64.b64encode(WIDE.read_bytes()).decode()))
        b.until("document.querySelectorAll('#pictures img').length == 1")
        assert shown(b, "#live") == ["b.png cannot be read as a picture"]
        press(b, "#pictures button")
        assert b.js("document.querySelector('#pictures').hidden && document.querySelector('#send').disabled")
        b.js(FILE % json.dumps(base64.b64encode(WIDE.read_bytes()).decode()))
        press(b, "#send:enabled")  # a picture without a text
        b.until(f"{IDLE} && document.querySelectorAll('.assistant .t').length > 2")
        assert b.js("document.querySelectorAll('.message.user img').length") == 1 and shown(b, ".error") == []
        b.js("document.querySelectorAll('.assistant .t')[2].click()")
        press(b, "#probe .look")
        b.until("document.querySelector('.looked img')?.complete")
        said = shown(b, ".looked figcaption")
        assert re.search(r"% on the picture, most at line \d of 3, column \d of 5", said[0]), said
        alpha = "[...document.querySelector('.looked canvas').getContext('2d').getImageData(0, 0, 5, 3).data]"
        veil = b.js(f"{alpha}.filter((_, i) => i % 4 == 3)")
        assert len(veil) == 15 and min(veil) == 0 and max(veil) > 20  # light where it looks most
        press(b, ".lens button:first-child")
        assert shown(b, ".looked figcaption") != said
        press(b, "#probe .look")
        press(b, "#probe button:not([aria-current]):enabled")  # another token, from which the answer goes on
        b.until(f"{IDLE} && document.querySelector('.assistant .switcher') !== null")
        assert shown(b, ".error") == [] and b.errors == []


def test_markdown_of_answers_is_safe(browser: Browser, served: tuple[str, subprocess.Popen[bytes]]) -> None:
    """The elements of each text; the leaves are called with the place of their text in the source."""
    browser.visit(served[0] + "/", READY)
    markdown = (
        "async (source) => {"
        + """
      const { render } = await import("./markdown.js");
      const into = document.createElement("div");
      let same = true;
      render(into, source, (parent, text, at) => {
        same &&= source.startsWith(text, at) || text.includes(" ");
        parent.append(text);
      });
      for (const e of into.querySelectorAll("figcaption")) e.remove();
      for (const e of into.querySelectorAll("[target]")) { e.removeAttribute("target"); e.removeAttribute("rel"); }
      return [same, into.innerHTML];
    }"""
    )
    cases = {
        "a *b* **c** `d*e*`": "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code></p>",
        "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
        "# T\ntext": "<h3>T</h3><p>text</p>",
        "- a\n- b\n  1. c\n\n- d": "<ul><li>a</li><li>b<ol><li>c</li></ol></li><li>d</li></ul>",
        "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
        "> q\n> r": "<blockquote><p>q<br>r</p></blockquote>",
        "```py\nx = 1\n\ny\n```\nz": f"{CODE[0]}x = 1\n\ny{CODE[1]}<p>z</p>",
        "```\nopen": f"{CODE[0]}open{CODE[1]}",
        "[a](https://b.c)": '<p><a href="https://b.c">a</a></p>',
        "see https://b.c/d.": '<p>see <a href="https://b.c/d">https://b.c/d</a>.</p>',
        "[a](javascript:alert(1))": "<p>[a](javascript:alert(1))</p>",
        "[a](data:text/html,x)": "<p>[a](data:text/html,x)</p>",
        "<img src=x onerror=alert(1)> &lt;": "<p>&lt;img src=x onerror=alert(1)&gt; &amp;lt;</p>",
        "2 * 3 * 4, a_b_c, \\*x\\*": "<p>2 * 3 * 4, a_b_c, *x*</p>",
        "**open *and": "<p>**open *and</p>",
        "***": "<hr>",
        "": "",
    }
    for source, html in cases.items():
        assert browser.js(f"({markdown})({json.dumps(source)})") == [True, html], source
    long = ["*" * 3000, "_a" * 3000, "[" * 3000, "`" * 3001 + "a", "- " * 1000, "> " * 500, "#" * 3000, "*a " * 1500]
    took = browser.js(
        f"(async () => {{ const begun = performance.now(); for (const s of {json.dumps(long)}) await ({markdown})(s);"
        " return performance.now() - begun; })()"
    )
    assert took < 10_000  # nothing grows with the square of a square


def test_tokens_fit_the_text_that_is_shown(browser: Browser, served: tuple[str, subprocess.Popen[bytes]]) -> None:
    """Characters of several tokens, tokens of several chunks, and parts that a reply does not show."""
    browser.visit(served[0] + "/", READY)
    code = """(async (parts) => {
      const { Aligner } = await import("./tokens.js");
      const aligner = new Aligner();
      const entry = (bytes) => ({ token: "", bytes, logprob: -bytes[0], top_logprobs: [] });
      return parts.map(([text, tokens]) => aligner.take(text, tokens?.map(entry)).map((t) => [t[0], t[1] ?? null]));
    })"""

    def fitted(*parts: tuple[str, list[bytes] | None]) -> list[list[tuple[str, int | None]]]:
        given = [(text, None if tokens is None else [list(t) for t in tokens]) for text, tokens in parts]
        return [[(s, x) for s, x in got] for got in browser.js(f"{code}({json.dumps(given)})")]

    assert fitted(("ab", [b"a", b"b"]), ("c", None)) == [[("a", -97), ("b", -98)], [("c", None)]]
    euro = "€".encode()
    assert fitted(("", [euro[:1]]), ("", [euro[1:2]]), ("€x", [euro[2:], b"x"])) == [[], [], [("€", -226), ("x", -120)]]
    assert fitted(("", [b"<think>", b"hm", b"</think>"]), ("so", [b"so"])) == [[], [("so", -115)]]
    assert fitted(("", [b"he"]), ("hell", [b"llo"]), ("o", [])) == [[], [("he", -104), ("ll", -108)], [("o", -108)]]
