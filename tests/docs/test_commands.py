"""Every command and every piece of Python in README and docs does what the page says that it does.

Commands of ours are run, in folders with small runs and archives under the names that the pages use; of
others it is checked that what they name exists. What is not run stands in `NOT_RUN`, with the reason.
"""

import ast
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from benchmarks.run import BENCHMARKS
from inshrink_core.cli import main
from inshrink_core.cli.application import known_verbs
from inshrink_core.cli.derived import read_request
from inshrink_core.request import fields_of, request_of
from tests.docs.pages import PAGES, ROOT, blocks

VERBS = {verb: request_of(verb) for verb in known_verbs()}
COMMON = {"--help", "-h", "--json", "--quiet", "-q", "--progress"}
"""Options of every verb."""

GUIDES = {page for page in PAGES if page.startswith("docs/guides/")}
FOLLOWED = {"docs/tutorial.md", "docs/integrations/dcp.md", *GUIDES}
"""Pages that tests of their own follow: test_tutorial.py, and tests/**/test_NAME_guide.py."""

NO_SHELL = {
    ("docs/cli.md", 'codec = "lattice"'): "a configuration, which `estimate --config my.toml` reads here",
    ("docs/design.md", "run on disk ──formats──▶"): "a picture",
    ("docs/format.md", "NAME.inshrink/"): "a picture",
    ("docs/format.md", "FrameHeader (88) |"): "a picture",
    ("docs/format.md", "ManifestHeader (40) |"): "a picture",
    ("docs/format.md", "PackHeader (16) |"): "a picture",
    ("docs/guides/reader.md", "run/step-100/index.json"): "a picture",
}
"""Indented blocks that are no commands, by how they begin."""

NOT_RUN = {
    r"^inshrink ui\b|--watch(?! --until)\b": "does not end by itself; tests of explorer and watch run it",
    r"\bs3://": "needs a bucket; tests/archive/test_objects.py reads one in memory",
    r"\bhf://": "needs the Hub; tests/integrations/test_hub.py writes to a server of its own",
    r"^inshrink rehearse (char-gpt|regression)\b": "trains for minutes to hours; tests/lab has small ones",
    r"^inshrink bench runs/digits --trust-run -o bench$": "measures every codec; the next is run",
    r"^inshrink run request.json --trust": "its digest is that of nobody's code",
}
"""Commands of ours that are only parsed, and why."""

EXITS = {
    # The template's TODO are not filled in.
    ("docs/cli.md", "inshrink evaluate runs/digits --evaluator judge.py:evaluate"): 2,
    ("docs/evaluators.md", "inshrink evaluate runs/mine --evaluator runs/mine/evaluator.py:evaluate"): 2,
    # The run is none of transformers; tests/integrations judges some.
    ("docs/evaluators.md", "inshrink compress runs/mine -o mine.inshrink --evaluator auto"): 2,
}
"""Exit codes that are not 0, and why."""

NOT_EXECUTED = ("docs/guides/", "docs/integrations/")
"""Pages whose Python is compiled and its imports from us looked up; tests of their own run it."""

BEFORE = {
    "README.md": """
        import torch, inshrink_core
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        def train(step):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    """,
    "docs/evaluators.md": """
        import torch
        images, labels = torch.randn(64, 16), torch.randint(3, (64,))
        batches = [(images[:32], labels[:32]), (images[32:], labels[32:])]
        def load(state):
            model = torch.nn.Linear(16, 3)
            model.load_state_dict(state)
            return model.eval().requires_grad_(False)
        def full(returned):
            return list(returned)[-1] if hasattr(returned, "__next__") else returned
    """,
    "docs/saver.md": """
        import torch, inshrink_core
        from torch.nn import functional
        n_steps, step = 300, 100
        def build_model():
            return torch.nn.Linear(3, 2)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias])
        average, net = build_model(), build_model()
        its_optimizer = torch.optim.AdamW(net.parameters())
        inputs, labels = torch.randn(8, 3), torch.randint(2, (8,))
        def batch(step):
            return inputs
        def compute_loss(model, inputs):
            return functional.cross_entropy(model(inputs), labels)
        saver = inshrink_core.Saver("own.inshrink", model, optimizer)
    """,
}
"""Names that the blocks of a page take as given."""

AFTER = {
    "docs/evaluators.md": """
        told = full(evaluate(torch.nn.Linear(16, 3).state_dict()))
        assert told["log_probs"].shape == (64, 3), told
        assert float(told["loss"]) > 0
    """,
    "docs/rehearsal.md": """
        task = MyTask()
        model = task.build()
        before = task.evaluate(model)
        optimizer = task.optimizer(model)
        for step in range(20):
            optimizer.zero_grad()
            task.loss(model, task.batch(step, torch.Generator().manual_seed(step))).backward()
            optimizer.step()
        assert task.evaluate(model) < before
    """,
    "docs/saver.md": "saver.close()",
}

TRAIN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_qkv = nn.Linear(16, 48)

    def forward(self, x):
        return x + self.attn_qkv(x)[..., :16]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(8, 16)
        self.conv1 = nn.Conv1d(1, 1, 3, padding=1)
        self.blocks = nn.ModuleList([Block()])
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        x = self.blocks[0](self.conv1(self.emb(tokens)[:, None])[:, 0])
        return self.head(self.fc2(self.fc1(x).relu()))
"""

JUDGE = """
import torch
from train import Net

TOKENS = torch.arange(64) % 8


def evaluate(state_dict):
    model = Net()
    model.load_state_dict(state_dict)
    with torch.inference_mode():
        log_probs = torch.log_softmax(model(TOKENS), dim=-1)
    labels = TOKENS % 3
    return {
        "accuracy": (log_probs.argmax(-1) == labels).float().mean(),
        "loss": torch.nn.functional.nll_loss(log_probs, labels),
        "log_probs": log_probs,
    }


judge = evaluate
"""

MADE = ("-o", "--output", "--out", "--pack", "--unpack", "--write")
"""Options that name what a command makes."""

STEPS = (100, 200, 400, 1600, 2000, 4000, 10000)


def _normal(line):
    """Return a command without its comment and its spaces, quoted in one way."""
    return shlex.join(shlex.split(line, comments=True))


def _is_run(line):
    return not any(re.search(pattern, line) for pattern in NOT_RUN)


EXITS = {(page, _normal(line)): code for (page, line), code in EXITS.items()}


def _written(folder, text):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text(text)


def _make_run(folder, train, steps):
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = train.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(64) % 8
    for step in steps:
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens), tokens % 3).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / f"step-{step}.pt")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Return a folder with everything that the pages take as given."""
    folder = tmp_path_factory.mktemp("template")
    _written(folder / "train.py", TRAIN)
    spec = importlib.util.spec_from_file_location("documented_train", folder / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for name in ("runs/mine", "runs/digits", "runs/tuned"):
        _make_run(folder / name, train, STEPS)
    first = torch.load(folder / "runs" / "tuned" / "step-100.pt", weights_only=True)["model"]
    (folder / "models").mkdir()
    safetensors.torch.save_file(first, folder / "models" / "pretrained.safetensors")
    for name in ("evaluator.py", "judge.py", "runs/digits/evaluator.py"):
        _written(folder / name, JUDGE)
    _written(folder / "runs" / "digits" / "train.py", TRAIN)
    (settings,) = [
        block.text for block in blocks("docs/evaluators.md") if block.text.startswith("# inshrink.toml")
    ]
    _written(folder / "runs" / "digits" / "inshrink.toml", settings)
    _written(folder / "my_model.py", "import torch\n\n\ndef MyModel():\n    return torch.nn.Linear(16, 3)\n")
    (config,) = [block.text for block in blocks("docs/cli.md") if block.text.startswith('codec = "lattice"')]
    _written(folder / "my.toml", config)
    _written(folder / "request.json", '{"verb": "inspect", "fields": {"source": "runs/digits"}}')
    (task,) = [block.text for block in blocks("docs/rehearsal.md") if "class MyTask" in block.text]
    _written(folder / "my_task.py", task.replace("= 1000, 20, 9", "= 40, 5, 4"))
    _written(folder / "out" / "checkpoint-100" / "notes.txt", "of another program")
    shutil.copy(folder / "runs" / "mine" / "step-100.pt", folder / "out" / "checkpoint-100" / "model.pt")
    digits = str(folder / "runs" / "digits")
    for name, codec in (("digits", "lattice"), ("lattice", "lattice"), ("uniform", "uniform")):
        target = str(folder / f"{name}.inshrink")
        assert main(["compress", digits, "-o", target, "--codec", codec, "--quiet"]) == 0
    for name in ("mine", "run"):
        target = str(folder / f"{name}.inshrink")
        assert main(["compress", str(folder / "runs" / "mine"), "-o", target, "--quiet"]) == 0
    judged = ["--evaluator", f"{folder}/judge.py:evaluate"]
    found = ["search", digits, "--max-drop", "0.5", "--budget", "2", "-o", str(folder / "search.json")]
    assert main([*found, *judged, "--steps", "100,200", "--quiet"]) == 0
    reported = [sys.executable, "-m", "inshrink_core.cli", "compare", f"{folder}/digits.inshrink", "--json"]
    with (folder / "compared.json").open("w") as file:
        subprocess.run(
            [*reported, "--against", digits, "--steps", "100", *judged], cwd=ROOT, stdout=file, check=True
        )
    return folder


def _workspace(template, folder, words):
    """Return a copy of the template, without what the commands themselves make before they use it."""
    shutil.copytree(template, folder)
    seen: set[str] = set()
    for line in words:
        for before, word in itertools.pairwise(line):
            path = folder / word.rstrip("/")
            if before in MADE and word not in seen and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        seen.update(line)
    return folder


def _ours(block):
    """Return the commands of ours in a block: as they are told of in lists, and their words."""
    lines = [shlex.split(line, comments=True) for line in block.commands]
    return [(shlex.join(words), words[1:]) for words in lines if words and words[0] == "inshrink"]


def _is_synopsis(block):
    return (
        block.is_shell
        and block.page == "docs/cli.md"
        and bool(re.search(r"\[|…|\||ARCHIVE|FILE", block.text))
    )


SHELL = [block for page in PAGES for block in blocks(page) if block.is_shell and not _is_synopsis(block)]
TOLD = {(block.page, _normal(line)) for block in SHELL for line in block.commands}


def test_every_block_is_known_for_what_it_is():
    for page in PAGES:
        for block in blocks(page):
            if block.fence is None and not block.is_shell:
                assert any(page == item and block.text.startswith(begin) for item, begin in NO_SHELL), block
            elif block.fence is not None:
                language = block.fence.partition(" ")[0]
                assert block.is_shell or block.is_python or language in ("toml", "json", "text"), block
    for page, begin in NO_SHELL:
        assert any(item.text.startswith(begin) for item in blocks(page)), begin
    assert {*EXITS} <= TOLD
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for _, line in TOLD), pattern


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.page == page for block in SHELL)])
def test_commands_of_others_name_what_there_is(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in [line for block in SHELL if block.page == page for line in block.commands]:
        words = shlex.split(line, comments=True)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
            if words and words[0].endswith(")"):
                words.pop(0)
        program = Path(words[0]).name
        if program == "make":
            assert words[1] in targets, line
        elif program.startswith("python") and words[1] == "-m":
            assert importlib.util.find_spec(words[2]), line
            if words[2] == "benchmarks.run":
                assert set(words[3:]) <= set(BENCHMARKS), line
        elif program.startswith("python"):
            assert words[1] in {block.title for block in blocks(page)}, line
        elif program == "pip" and re.search(r"(?:inshrink|\.)\[", line):
            assert set(re.search(r"\[(.*)\]", line)[1].split(",")) <= set(extras), line
        else:
            assert program in ("inshrink", "pip", "torchrun", "ssh"), line


def test_synopses_and_commands_within_sentences_name_verbs_and_options_that_there_are():
    for page in PAGES:
        text = (ROOT / page).read_text()
        reported = re.findall(r"`(inshrink [^`]+)`", text)
        reported += [line for block in blocks(page) if _is_synopsis(block) for line in block.commands]
        for line in reported:
            _, verb, *words = re.split(r"[\s\[\]|]+", line)
            if verb in ("VERB", "…", "--help", "--version"):
                continue
            assert verb in VERBS, (page, line)
            fields = fields_of(VERBS[verb])
            known = {name for field in fields for name in (*field.names, field.off)}
            asked = {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)}
            assert asked <= known | COMMON, (page, line)


def test_commands_that_are_not_run_are_understood():
    for page, line in TOLD:
        program, *words = shlex.split(line)
        if program == "inshrink" and page not in GUIDES and not _is_run(line):
            read_request(VERBS[words[0]], words)


@pytest.mark.documentation
@pytest.mark.timeout(600)
def test_every_command_and_every_piece_of_python_runs(template, tmp_path):
    jobs, labels = [], []
    for page in PAGES:
        if page in FOLLOWED:
            continue
        groups = [_ours(block) for block in SHELL if block.page == page]
        if page != "docs/cli.md":  # whose examples stand each for itself
            groups = [[line for group in groups for line in group]]
        for group in groups:
            lines = [(line, words) for line, words in group if _is_run(line)]
            if not lines:
                continue
            folder = _workspace(template, tmp_path / f"{len(jobs)}", [words for _, words in lines])
            for line, words in lines:
                jobs.append({"folder": str(folder), "words": words})
                labels.append((page, line))
        for block in blocks(page):
            if not block.is_python or block.title or _not_executed(block):
                continue
            folder = _workspace(template, tmp_path / f"{len(jobs)}", [])
            for name in re.findall(r'"(\w+\.inshrink)"', block.text) if "Saver(" in block.text else ():
                shutil.rmtree(folder / name, ignore_errors=True)
            before, after = (inspect.cleandoc(part.get(page, "")) for part in (BEFORE, AFTER))
            jobs.append({"folder": str(folder), "text": block.text, "before": before, "after": after})
            labels.append((page, f"line {block.line}"))
    asked, answered = tmp_path / "jobs.json", tmp_path / "results.json"
    asked.write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lines.py")), str(asked), str(answered)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    results = json.loads(answered.read_text())
    wrong = [
        f"{page}: {line}\nended with {result['code']}\n{result['output'][-1500:]}"
        for (page, line), result in zip(labels, results, strict=True)
        if result["code"] != EXITS.get((page, line), 0)
    ]
    assert not wrong, "\n\n".join(wrong)


def _not_executed(block):
    return block.page in FOLLOWED or block.page.startswith(NOT_EXECUTED) or '"s3://' in block.text


def test_python_that_is_not_executed_imports_what_there_is():
    found = [block for page in PAGES for block in blocks(page) if block.is_python and _not_executed(block)]
    for node in [node for block in found for node in ast.walk(ast.parse(inspect.cleandoc(block.text)))]:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("inshrink_core"):
            source = Path(importlib.util.find_spec(node.module).origin).read_text()
            for name in node.names:
                assert re.search(rf"^(?:class|def) {name.name}\b|\b{name.name}\b", source, re.MULTILINE)
