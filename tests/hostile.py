"""A working directory as an attacker leaves it: every module anybody might import, each leaving a trace."""

import json
import sys

__all__ = ["BEFORE_US", "executed", "lay_traps"]

BEFORE_US = frozenset({*sys.stdlib_module_names, "inshrink_core", "sitecustomize", "usercustomize"})
"""What ``python -m`` takes from the working directory before our first line: nobody can help these."""

_THIRD_PARTY = """
numpy torch numba llvmlite zstandard safetensors msgpack msgspec google_crc32c cyclopts click rich streamlit
plotly pandas starlette uvicorn anyio yaml pyarrow sklearn scipy triton fsspec transformers matplotlib dotenv
watchdog toml altair tornado PIL requests jinja2 httptools uvloop websockets protobuf google psutil cuda
usercustomize sitecustomize conftest setup main app inshrink_app inshrink_lab inshrink_samples
sample_checkpoints evaluator comparison child worker
"""


def lay_traps(folder, traces, *, spare=frozenset()):
    """Write a module or a package for every name, and settings that lead to code.

    Parameters
    ----------
    folder
        Where the victim will stand.
    traces
        Each piece of code that is executed leaves a file there.
    spare
        Names that are left alone.
    """
    traces.mkdir(exist_ok=True)
    names = {*_THIRD_PARTY.split(), *sys.stdlib_module_names, "inshrink_core"} - spare
    for name in sorted(names):
        code = f"open({str(traces / name)!r}, 'w').close()\n"
        if name in ("torch", "numpy", "inshrink_app", "inshrink_core", "inshrink_lab", "google", "streamlit"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "__init__.py").write_text(code)
            (folder / name / "worker.py").write_text(code)
        else:
            (folder / f"{name}.py").write_text(code)
    (folder / ".streamlit").mkdir(exist_ok=True)
    (folder / ".streamlit" / "config.toml").write_text(
        '[server]\nbaseUrlPath = "stolen"\nenableStaticServing = true\n[theme]\nbase = "dark"\n'
        '[[theme.fontFaces]]\nfamily = "x"\nurl = "https://stolen.example/x.woff2"\n'
    )
    (folder / ".streamlit" / "secrets.toml").write_text('stolen = "yes"\n')
    (folder / ".env").write_text("NUMBA_DISABLE_JIT=1\n")
    (folder / "pages").mkdir(exist_ok=True)
    (folder / "pages" / "stolen.py").write_text(f"open({str(traces / 'pages')!r}, 'w').close()\n")
    settings = {"cache_dir": str(traces / "numba-cache")}
    (folder / ".numba_config.yaml").write_text(json.dumps(settings))  # JSON is YAML too.
    (folder / "matplotlibrc").write_text("backend: module://main\n")


def executed(traces):
    """Return the names of the traps that went off."""
    return sorted(path.name for path in traces.iterdir())
