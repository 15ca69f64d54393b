"""The Python in README and docs runs, prints what the document says, and every link leads somewhere.

    ```python                   run, in the order of the page and in one namespace for the page
    ```python needs NAME        only where the module NAME can be imported, or NAME is cuda and there is one: in a test of its
                                own, after those that need nothing, so that it is seen to be skipped
    ```text output              what the block before it prints; <...> stands for any text within a line

The C programs and shell commands are test_docs.sh's business.
"""
import contextlib
import importlib.util
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """(line, words after the fence, text, what it should print or None) for the Python of a page."""
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        kind = match[1].split()
        if kind[:1] == ["python"]:
            found.append([text.count("\n", 0, match.start()) + 2, kind[1:], match[2], None])
        elif kind == ["text", "output"] and found and between(text, found[-1], match.start()):
            found[-1][3] = match[2]
    return found


def between(text, block, position):
    """Nothing but prose lies between a block and its output: output after C or sh belongs to those."""
    lines = text[:position].splitlines()[block[0] - 1 + block[2].count("\n") + 1:]
    return not any(line.startswith("```") for line in lines)


def available(name):
    if name == "cuda":
        import torch
        return torch.cuda.is_available()
    return importlib.util.find_spec(name) is not None


def agrees(want, got):
    pattern = "".join(".*" if part == "<...>" else re.escape(part) for part in re.split(r"(<\.\.\.>)", want.rstrip("\n")))
    return re.fullmatch(pattern, got.rstrip("\n")) is not None


WITH_PYTHON = [page for page in PAGES if page.exists() and blocks(page)]
NEEDS = [(page, needs) for page in WITH_PYTHON for needs in dict.fromkeys(tuple(words[1:]) for _, words, *_ in blocks(page))]


@pytest.mark.parametrize("page,needs", NEEDS, ids=lambda x: " ".join(x) if isinstance(x, tuple) else str(x.relative_to(ROOT)))
def test_the_python_of(page, needs, tmp_path, monkeypatch):
    chosen = [block for block in blocks(page) if set(block[1][1:]) <= set(needs)]
    torch = ["torch"] if any("import torch" in text for _, _, text, _ in chosen) else []
    for name in (*torch, *needs):
        if not available(name):
            pytest.skip(f"{name} is not here")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, words, text, output in chosen:
        assert words[:1] in ([], ["needs"]), f"{page}:{line}: ```python {' '.join(words)}"
        printed = io.StringIO()
        code = compile("\n" * (line - 1) + text, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if output is not None:
            assert agrees(output, printed.getvalue()), f"{page}:{line} prints\n{printed.getvalue()}"


def test_there_is_python_in_every_page_about_it():
    names = {page.name for page in WITH_PYTHON}
    pages = {page.name for page in (ROOT / "docs" / "python").glob("*.md")}
    assert len(pages) >= 7 and pages <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        assert link.startswith(("http:", "https:")) or (page.parent / link).exists(), f"{page} links to {link}"
