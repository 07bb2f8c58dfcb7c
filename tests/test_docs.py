"""What the documents say is true: code runs, commands exist and print what is shown, files and tables match."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rectiformer.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("studies/*.md"))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
sys.path.insert(0, str(DOCS))


def blocks(language):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for index, match in enumerate(re.finditer(rf"```{language}\n(.*?)```", text, re.DOTALL)):
            yield pytest.param(match[1], id=f"{page.name} {language} {index + 1}")


def targets_exist(*targets):
    command = ["make", "--dry-run", *targets]
    return subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_blocks_run(python, code):
    exit_code, printed = python("-c", code)
    assert exit_code == 0, printed


def options_of(words):
    """The options of the command that `words` begin with."""
    command = typer.main.get_command(app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("text", list(blocks("sh")))
def test_shell_blocks_name_real_commands(python, text):
    """Long commands are not run here; that each exists, with the options it is shown with, is."""
    for line in text.strip().splitlines():
        words = line.split("#")[0].strip().removeprefix(".venv/bin/").split()
        if words[0] == "make":
            assert targets_exist(words[1])
        elif words[0] in ("rectiformer", "torchrun"):  # of the latter, what it is to start
            words = words[words.index("rectiformer") :]
            known = options_of(words[1:])
            assert all(word in known for word in words if word.startswith("--")), line
        elif words[0] in ("pytest", "ruff", "mypy") or words[1:3] == ["-m", "pytest"]:
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), line
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), line
            _, usage = python(words[1], "--help")
            assert all(word in usage for word in words if word.startswith("--")), line
        else:
            pytest.fail(f"no rule for {line!r}")


def test_make_targets_named_in_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"make (\w+)", readme))
    assert {"demo", "test"} <= targets
    assert targets_exist(*targets)


def shown(marker):
    """The text block of the README that holds `marker`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [text for text in re.findall(r"```text\n(.*?)```", readme, re.DOTALL) if marker in text]
    return [line.rstrip() for line in block.strip().splitlines()]


def test_the_readme_shows_the_table_of_the_demo():
    """The demonstration takes minutes, so it is not run here; what it prints is the README's table, of its models."""
    from rectiformer.demo import VARIANTS, findings_table

    columns, _ = findings_table([])
    lines = shown("aligned by")
    assert re.split(r" {2,}", lines[0]) == list(columns)
    assert [line.split()[0] for line in lines[1 : 1 + len(VARIANTS)]] == list(VARIANTS)


def architecture():
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_map_names_every_file():
    named = set(re.findall(r"(\w+\.py)\b", architecture().split("```")[1]))
    assert named == {path.name for path in (ROOT / "rectiformer").rglob("*.py")} - {"__main__.py", "__init__.py"}


def walks():
    """Title, promised number of files, and the (file, function) steps of every walk of docs/architecture.md."""
    for title, files, text in re.findall(r"### ([^\n]+) \((\d+) files\)\n(.*?)(?=\n##|\Z)", architecture(), re.DOTALL):
        yield pytest.param(int(files), re.findall(r"`([\w/]+\.py): ([\w.]+)`", text), id=title)


def functions_of(path):
    """Names of the functions and classes of a file, methods as Class.method."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS))


@pytest.mark.parametrize(("files", "steps"), list(walks()))
def test_walks_name_real_functions(files, steps):
    assert steps
    for file, function in steps:
        assert function in functions_of(ROOT / "rectiformer" / file), f"{file} has no {function}"
    assert len({file for file, _ in steps}) == files


def test_the_architecture_has_its_walks_and_fits_two_screens():
    assert len(list(walks())) >= 5
    assert architecture().count("\n") <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_merge_was_left_half_done(page):
    assert not re.search(r"^(<{7} |={7}$|>{7} )", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_match_the_code_and_the_measured_points():
    import generate

    for page in generate.PAGES:
        assert generate.fill_tables(page) == page.read_text(encoding="utf-8"), "run `make docs`"
